from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from pytest_megatron.runs.ledger import RunLedger

SAID = (
    "infrastructure: 2 of 3 workloads failed for causes of the machine or the network (dns); "
    "nothing more is run again"
)


CLAIM_TEN = """
import sys
from pathlib import Path
from pytest_megatron.runs.ledger import RunLedger
ledger = RunLedger(run_dir=Path(sys.argv[1]), max_retries=25)
print(sum(ledger.claim(str(n), "dns") is None for n in range(10)))
"""


def test_all_processes_of_a_run_share_its_limit(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CLAIM_TEN, str(tmp_path)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert sum(int(process.communicate()[0]) for process in processes) == 25


def test_no_further_attempts_at_all(tmp_path: Path) -> None:
    refusal = RunLedger(run_dir=tmp_path, max_retries=0).claim("a", "dns")
    assert refusal == "the run's 0 further attempts are used up"


def test_more_than_half_of_the_items_broken_is_infrastructure_and_said_once(
    tmp_path: Path,
) -> None:
    ledger = RunLedger(run_dir=tmp_path)
    assert ledger.infrastructure() is None
    ends = [("a", "dns"), ("b", "dns"), ("c", None), ("d", "dns")]
    assert [ledger.note_end(*end) for end in ends] == [None, None, SAID, None]
    assert ledger.claim("e", "dns") == (
        "more than half of the run failed for causes of the machine or the network"
    )
    assert ledger.infrastructure() == SAID.replace("2 of 3", "3 of 4")


def test_a_run_that_recovers_may_try_again(tmp_path: Path) -> None:
    ledger = RunLedger(run_dir=tmp_path)
    for name, cause in (("a", "dns"), ("b", "dns"), ("c", None), ("d", None)):
        ledger.note_end(name, cause)
    assert ledger.claim("e", "dns") is None


def test_a_line_that_was_not_finished_is_left_out(tmp_path: Path) -> None:
    ledger = RunLedger(run_dir=tmp_path, max_retries=1)
    assert ledger.claim("a", "dns") is None
    with (tmp_path / "retries.jsonl").open("a") as file:
        file.write('{"event": "ret')
    assert ledger.claim("b", "dns") == "the run's 1 further attempts are used up"
    assert len((tmp_path / "retries.jsonl").read_text().splitlines()) == 2


def test_a_retry_budget_that_cannot_be_written_grants_nothing_and_fails_nothing(
    tmp_path: Path,
) -> None:
    ledger = RunLedger(run_dir=tmp_path / "gone")
    said = f"{tmp_path}/gone/retries.jsonl: No such file or directory"
    assert ledger.claim("a", "dns") == said
    assert (ledger.note_end("a", "dns"), ledger.infrastructure()) == (None, None)


def test_a_machine_that_fails_under_many_items_is_one_incident(tmp_path: Path) -> None:
    ledger = RunLedger(run_dir=tmp_path, max_retries=3)
    dead = [ledger.claim(str(n), "engine_node_fail", ("node1",)) for n in range(14)]
    assert dead == [None] * 14
    assert ledger.claim("other", "dns") is None
    assert ledger.claim("wide", "engine_node_fail", ("node1", "node2")) is None
    refusal = "the run's 3 further attempts are used up"
    assert ledger.claim("again", "engine_lost", ("node1",)) == refusal
    assert ledger.claim("a", "engine_node_fail", ("node2",)) is None
    another = RunLedger(run_dir=tmp_path, max_retries=3)
    assert another.claim("b", "dns") == refusal

"""What ranks print: complete in their logs, live on the terminal where it was asked for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from gang_suite import RecordedSuite, Run

PRINTING = """
    import os, signal, sys, time

    def test_prints(rank):
        print("out of", rank)
        print("err of", rank, file=sys.stderr)
        print("without an end", end="")

    def test_is_killed(rank):
        print("last words", end="")
        if rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    def test_reads_its_own_output(rank, capsys):
        print("captured")
        assert capsys.readouterr().out == "captured\\n"
        with capsys.disabled():
            print("not captured")

    def test_reads_what_comes_from_below(rank, capfd):
        os.write(1, b"captured\\n")
        assert capfd.readouterr().out == "captured\\n"

    def test_fails(rank):
        print("kept of", rank)
        assert rank != 1
"""
OUTCOMES = {
    "test_prints": "PASSED",
    "test_is_killed": "FAILED",
    "test_reads_its_own_output": "PASSED",
    "test_reads_what_comes_from_below": "PASSED",
    "test_fails": "FAILED",
}


KEEPS_STREAMS = """
    import logging, sys

    STDOUT = sys.stdout
    handler = logging.StreamHandler()
    logging.getLogger("of-a-module").addHandler(handler)

    def test_writes(rank):
        logging.getLogger("of-a-module").warning("logged by %s", rank)
        print("printed by", rank, file=STDOUT)
"""


def copied(run: Run) -> list[str]:
    return [line for line in run.printed if line.startswith("[rank")]


def test_without_capture_the_default_ranks_are_copied(tmp_path: Path) -> None:
    suite = RecordedSuite(root=tmp_path).write(test_it=PRINTING)
    run = suite.run("--ranks", "4", "-s", "-v")
    assert run.outcomes == OUTCOMES
    start = run.printed.index("test_it.py::test_prints ")
    end = run.printed.index("test_it.py::test_is_killed ")
    assert sorted(run.printed[start + 1 : end - 1]) == [
        f"[rank{rank}]: {text}"
        for rank in (0, 3)
        for text in (f"err of {rank}", f"out of {rank}", "without an end")
    ]
    assert run.printed[end - 1].startswith("PASSED")
    assert sorted(copied(run)[6:8]) == ["[rank0]: last words", "[rank3]: last words"]
    assert sorted(copied(run)[8:10]) == ["[rank0]: not captured", "[rank3]: not captured"]
    assert "Captured" not in run.stdout
    for rank in range(4):
        log = run.directory / "ranks" / "attempt_1" / str(rank) / "stdout.log"
        assert log.read_text() == f"out of {rank}\nwithout an endlast words"


@pytest.mark.parametrize("capture", ["fd", "sys", "no"])
def test_streams_that_a_module_keeps_are_those_of_its_rank(tmp_path: Path, capture: str) -> None:
    """As `logging.basicConfig` keeps the one into which pytest captures the import."""
    suite = RecordedSuite(root=tmp_path).write(test_it=KEEPS_STREAMS)
    run = suite.run("--ranks", "2", "-v", f"--capture={capture}", "--tee-ranks", "none")
    assert run.outcomes == {"test_writes": "PASSED"}, run.stdout
    for rank in range(2):
        log = run.directory / "ranks" / "attempt_1" / str(rank)
        assert "Logging error" not in (log / "stderr.log").read_text()
        if capture != "sys":
            assert (log / "stdout.log").read_text() == f"printed by {rank}\n"
            assert (log / "stderr.log").read_text() == f"logged by {rank}\n"


@pytest.mark.parametrize(
    ("typed", "ranks"), [([], []), (["--tee-ranks", "1"], [1]), (["--tee-ranks", "all"], [0, 1])]
)
def test_with_capture_only_typed_ranks_are_copied(
    tmp_path: Path, typed: list[str], ranks: list[int]
) -> None:
    suite = RecordedSuite(root=tmp_path).write(test_it=PRINTING)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmegatron_tee_ranks = 0\n")
    run = suite.run("--ranks", "2", "-k", "fails", *typed)
    assert sorted(copied(run)) == [f"[rank{rank}]: kept of {rank}" for rank in ranks]
    title = " Captured stdout call of rank 1 "
    (start,) = [n for n, line in enumerate(run.printed) if line.strip("-") == title]
    assert run.printed[start + 1] == "kept of 1"


def test_a_flood_is_copied_live_and_whole(tmp_path: Path) -> None:
    text = """
        from pathlib import Path

        def test_floods(rank):
            number = 0
            while not Path("stop").exists():
                print("line", number)
                number += 1
            print("the last is", number - 1)
    """
    suite = RecordedSuite(root=tmp_path).write(test_it=text)
    with suite.start("--ranks", "2", "-s", "--tee-ranks", "1") as process:
        assert process.stdout is not None
        seen = [line for _ in range(100) if (line := process.stdout.readline())]
        assert any(line.startswith("[rank1]: line ") for line in seen)  # the test still runs
        (tmp_path / "stop").touch()
        rest = process.stdout.read()
    lines = [x for x in ("".join(seen) + rest).splitlines() if x.startswith("[rank")]
    last = int(lines[-1].rpartition(" ")[2])
    expected = [f"[rank1]: line {number}" for number in range(last + 1)]
    assert lines[:-1] == expected
    assert rest.splitlines()[-1].strip("= ").startswith("1 passed")


def test_colours_are_for_the_terminal_alone(tmp_path: Path) -> None:
    failing = """
        def test_lists(rank):
            assert [1, 2] == [1, 3 + rank]
    """
    suite = RecordedSuite(root=tmp_path).write(test_it=failing)
    run = suite.run("--ranks", "2", "--color", "yes", "--junitxml", "junit.xml")
    assert "\x1b[" in run.stdout
    found = [tmp_path / "junit.xml", *(file for file in run.directory.rglob("*") if file.is_file())]
    texts = {file.name: file.read_text() for file in found}
    assert "At index 1 diff: 2 != " in texts["junit.xml"]  # of the rank that failed first
    assert [name for name, text in texts.items() if re.search(r"\x1b|#x1B|u001b", text)] == []

"""What is not run again: by the run's limit, a row's word, a fingerprint, a whole run that fails.

In Megatron-LM's harness a golden mismatch is run again, an earlier attempt's log decides, a hang
costs the limit three times, and restarts are hidden.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from tiny_project import Project, Run, send, wait_until

from pytest_megatron.base.files import JsonValue

NO_NAME = "echo 'OSError: Temporary failure in name resolution' >&2; exit 3"


ERRORS = {
    "never": "RuntimeError: Address already in use",
    "alarming": "AssertionError: Address already in use",
    "oom": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    "odd": "ValueError: NVRM: Xid (PCI:0000:06:00): 79, GPU has fallen off the bus.",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Scripts that print what a training would: they start in no time."""
    project = Project(root=tmp_path_factory.mktemp("limits"))
    project.row("dns", script=[NO_NAME], write_golden=False)
    for case, error in ERRORS.items():
        never: dict[str, JsonValue] = (
            {"never_transient": [["port_in_use"]]} if case == "never" else {}
        )
        said = f'echo "Traceback (most recent call last):" >&2; echo "{error}" >&2; exit 1'
        project.row(case, script=[said], write_golden=False, **never)
    changes = f"[ -e {project.state('other')} ] && {{{{ echo 'ValueError: no' >&2; exit 1; }}}}"
    other = f"{changes}; touch {project.state('other')}; {NO_NAME}"
    project.row("other", script=[other], write_golden=False)
    return project.run("recipes", "-o", "megatron_retry_backoff=0")


def once(state: Path) -> str:
    """Return a script that fails at its first start alone."""
    return f"[ -e {state} ] || {{{{ touch {state}; {NO_NAME}; }}}}"


def test_the_same_failure_twice_ends_it(run: Run) -> None:
    assert run.verdict("dns") == ("ERROR", "broken")
    first, second = run.attempts("dns")
    assert first["fingerprint"] == second["fingerprint"]
    reason = "it failed as attempt 1 did, at the same place: not by chance"
    assert run.record("dns")["not_run_again"] == reason
    advice = f"known as dns (transient as a rule; not run again: {reason}): "
    assert run.problem("dns").splitlines()[1].startswith(advice)


@pytest.mark.parametrize("case", ERRORS)
def test_what_is_the_codes_is_never_run_again(run: Run, case: str) -> None:
    assert run.verdict(case) == ("FAILED", "failed")
    assert [a["is_transient"] for a in run.attempts(case)] == [False]


def test_what_an_earlier_attempt_logged_does_not_count_for_a_later_one(run: Run) -> None:
    """Once one attempt logged a pattern, every later failure counted as flaky."""
    assert run.verdict("other") == ("FAILED", "failed")
    assert [a["is_transient"] for a in run.attempts("other")] == [True, False]


def test_a_flaky_item_fails_the_session_if_asked_to(tmp_path: Path) -> None:
    project = Project(root=tmp_path)
    project.row("once", script=[once(tmp_path / "once")], write_golden=False)
    run = project.run("recipes", "-o", "megatron_retry_backoff=0", "-o", "megatron_fail_flaky=true")
    assert (run.returncode, run.verdict("once")) == (1, ("PASSED", "flaky"))
    assert "megatron: 1 item was flaky, and megatron_fail_flaky is set" in run.stdout.splitlines()


@pytest.mark.nightly
def test_the_limit_of_a_run_holds_for_all_its_workers(tmp_path: Path) -> None:
    project = Project(root=tmp_path)
    for number in range(3):
        script = once(tmp_path / f"first_{number}")
        project.row(f"once_{number}", script=[script], write_golden=False)
    settings = ("megatron_retry_backoff=0", "megatron_max_retries_per_run=2")
    run = project.run("recipes", "-n", "3", *(f"-o{setting}" for setting in settings))
    verdicts = {run.record(f"once_{number}")["verdict"]: number for number in range(3)}
    assert sorted(map(str, verdicts)) == ["broken", "flaky"]
    refusal = run.record(f"once_{verdicts['broken']}")["not_run_again"]
    assert refusal == "0 for this worker of the run's 2 further attempts are used up"


def test_ctrl_c_ends_the_pause_before_another_attempt(tmp_path: Path) -> None:
    project = Project(root=tmp_path)
    project.row("dns", script=[NO_NAME], write_golden=False)
    process = project.start("recipes", "-o", "megatron_retry_backoff=1000")
    assert process.stdout is not None
    assert any("; again in " in line for line in process.stdout)  # the pause begins
    send(process, signal.SIGINT, to_group=True)
    process.communicate()
    assert process.returncode == pytest.ExitCode.INTERRUPTED
    wait_until(lambda: project.processes() == [], "no process left")

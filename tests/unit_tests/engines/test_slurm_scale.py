"""A whole run over a real Slurm: pytest is killed in the middle, and another one takes over."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from labs import SlurmLab
from slurm_scale import ScaleRun, kinds_of

NUM_JOBS = 12


@pytest.fixture(scope="module")
def run(slurm_lab: SlurmLab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScaleRun]:
    root = tmp_path_factory.mktemp("scale")
    run = ScaleRun(root=root, lab=slurm_lab, kinds=kinds_of(NUM_JOBS), sleep_s=None)
    run.write()
    run.start()
    try:
        carry_out(run)
        yield run
    finally:
        run.end()
        slurm_lab.mend()


def carry_out(run: ScaleRun) -> None:
    """Have a node and pytest itself go, and another pytest take over."""
    down = ("scontrol", "update", "nodename=node1", "state=down", "reason=test")
    run.do_at(2, "node1 went down", lambda: run.lab.ask(*down))
    code, said = run.attach_meanwhile()
    assert (code, "another controller follows" in said) == (pytest.ExitCode.USAGE_ERROR, True), said
    run.do_at(4, "pytest was killed", run.kill_pytest)
    run.go()
    run.start(f"--attach={run.root}/run")
    assert run.wait() == pytest.ExitCode.TESTS_FAILED, (run.root / "pytest.log").read_text()


def test_nothing_is_lost_and_nothing_runs_twice(run: ScaleRun) -> None:
    assert run.problems() == []


def test_the_second_pytest_reports_every_workload(run: ScaleRun) -> None:
    log = (run.root / "pytest.log").read_text()
    assert "1 failed, 11 passed" in log.rpartition("test session starts")[2]

"""A whole run over a real Slurm: pytest is killed in the middle, and another one takes over."""

from __future__ import annotations

import pytest
from labs import SlurmLab
from slurm_scale import ScaleRun, kinds_of

NUM_JOBS = 12


@pytest.fixture(scope="module")
def run(slurm_lab: SlurmLab, tmp_path_factory: pytest.TempPathFactory) -> ScaleRun:
    root = tmp_path_factory.mktemp("scale")
    run = ScaleRun(root=root, lab=slurm_lab, kinds=kinds_of(NUM_JOBS), sleep_s=1.0)
    run.write()
    run.start()
    down = ("scontrol", "update", "nodename=node1", "state=down", "reason=test")
    run.do_at(2, "node1 went down", lambda: slurm_lab.ask(*down))
    run.do_at(4, "some have begun", run.kill_pytest)
    run.start(f"--attach={root}/run")
    assert run.wait() == pytest.ExitCode.TESTS_FAILED, (root / "pytest.log").read_text()
    slurm_lab.mend()
    return run


def test_nothing_is_lost_and_nothing_runs_twice(run: ScaleRun) -> None:
    assert run.problems() == []


def test_the_second_pytest_reports_every_workload(run: ScaleRun) -> None:
    log = (run.root / "pytest.log").read_text()
    assert "1 failed, 11 passed" in log.rpartition("test session starts")[2]

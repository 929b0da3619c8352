"""A whole run over a real Slurm, of which a node goes down in the middle."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from labs import SlurmLab
from slurm_scale import ScaleRun, kinds_of

pytestmark = pytest.mark.nightly

NUM_JOBS = 12


@pytest.fixture(scope="module")
def run(slurm_lab: SlurmLab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScaleRun]:
    root = tmp_path_factory.mktemp("scale")
    run = ScaleRun(root=root, lab=slurm_lab, kinds=kinds_of(NUM_JOBS))
    run.write()
    run.start()
    try:
        carry_out(run)
        yield run
    finally:
        run.end()
        slurm_lab.fix()


def carry_out(run: ScaleRun) -> None:
    """Have a node go."""
    run.wait_until_begun(2)
    run.lab.ask("scontrol", "update", "nodename=node1", "state=down", "reason=test")
    run.go()
    assert run.wait() == pytest.ExitCode.TESTS_FAILED, (run.root / "pytest.log").read_text()


def test_nothing_is_lost_and_nothing_runs_twice(run: ScaleRun) -> None:
    assert run.problems() == []


def test_every_workload_is_reported(run: ScaleRun) -> None:
    assert "1 failed, 11 passed" in (run.root / "pytest.log").read_text()

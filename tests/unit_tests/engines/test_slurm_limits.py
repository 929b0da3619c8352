"""What Slurm itself ends on the lab: a job that takes too long, one that is in a better one's way.

Slurm counts its limits in minutes, and so the first is begun before the second and looked at after.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from labs import SlurmLab
from slurm_orders import Run, on_lab, outcomes, until

from pytest_megatron.engines.slurm.engine import SlurmEngine
from pytest_megatron.workloads.engine.api import SubmissionOutcome, TroubleKind

pytestmark = pytest.mark.nightly

FOREVER = 'touch "up-$ITEM"; exec sleep 1000'
_LIMIT_S = 150.0  # a limit of one minute is looked at every half minute
NOT_NODE4 = ("node1", "node2", "node3")


@pytest.fixture(scope="module")
def limited(slurm_lab: SlurmLab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmEngine]:
    """An engine with a job that takes longer than Slurm gives it, and not than its recipe does."""
    run = Run(tmp_path_factory.mktemp("limited"), minutes=1, limit_s=600.0)
    engine = on_lab(run, slurm_lab)
    engine.submit([run.order("slow", FOREVER)])
    until(engine, lambda _: (run.root / "up-slow").exists())
    yield engine
    engine.cancel([run.order("slow").key])
    engine.close()


def only_outcome(engine: SlurmEngine, limit_s: float) -> SubmissionOutcome:
    """Poll until the one order has ended."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        for update in engine.poll():
            if update.outcome is not None:
                return update.outcome
        time.sleep(engine.interval_s)
    raise AssertionError(f"not within {limit_s:g} s")


@pytest.mark.usefixtures("limited")
def test_a_job_that_a_better_one_drives_out_was_preempted(
    slurm_lab: SlurmLab, tmp_path: Path
) -> None:
    run = Run(tmp_path)
    engine = on_lab(run, slurm_lab)
    engine.submit([run.order("bumped", FOREVER, avoid_hosts=NOT_NODE4)])
    until(engine, lambda _: (run.root / "up-bumped").exists())
    urgent = ("--partition=urgent", "--nodelist=node4", "--exclusive", "--output=/dev/null")
    slurm_lab.submit(*urgent, "--wrap", "true")
    found = outcomes(engine, 1)["bumped"]
    engine.close()
    assert found.trouble is not None
    assert (found.trouble.kind, found.trouble.is_transient) == (TroubleKind.PREEMPTED, None)
    assert "on node4 ended as PREEMPTED" in found.trouble.text


def test_a_job_that_slurm_ends_for_its_time_is_told_from_one_that_failed(
    limited: SlurmEngine,
) -> None:
    found = only_outcome(limited, _LIMIT_S)
    assert found.trouble is not None
    assert found.trouble.kind is TroubleKind.TIMEOUT
    assert "ended as TIMEOUT" in found.trouble.text

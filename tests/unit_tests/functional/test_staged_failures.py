"""One staged failure of each family, and sound runs: real ranks under a step of Slurm.

The whole matrix, and torch's agent, are in `tests/failures/run_failures.py`; here the ranks are
forked from one process that has imported torch, which makes a case a matter of a second.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from failure_cases import CASES, Case
from failure_score import judge
from failure_stages import Stage, run_stage
from failure_warm import WarmTasks

ROOT = Path(__file__).parents[3]
BY_ID = {case.id: case for case in CASES}
FAMILIES = {
    "assert": "assertion-with-words",
    "ckpt_truncated": "checkpoint-empty",
    "config": "config-arguments-one-rank",
    "disk": "disk-full-text",
    "dns": "dns",
    "exception": "crash-chained",
    "exit": "exit-3",
    "golden_mismatch": "golden-text",
    "host_oom": "memory-numpy",
    "http_read": "http-incomplete",
    "import": "import-module",
    "limits": "descriptors",
    "mismatch": "state-dict-size",
    "nccl_timeout": "barrier-late",
    "network": "refused",
    "nonfinite_loss": "nan-loss",
    "port_in_use": "port-of-a-server",
    "segfault": "double-free",
    "service": "http-503",
    "sigkill": "killed-labelled",
    "store_timeout": "rank-never-starts-tasks",
}
SOUND = ("innocent-health", "innocent-retry", "innocent-traceback", "innocent-child")


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    warm = WarmTasks({"PYTHONPATH": paths})
    yield Stage(
        root=tmp_path_factory.mktemp("staged"), device="cpu", num_ranks=4, full_disk=None, warm=warm
    )
    warm.close()


def quick(case: Case) -> Case:
    """Run under Slurm, with time-outs that nobody has to wait for."""
    form = case.form if case.form == "srun" else "tasks"
    return replace(case, form=form, arguments=(*case.arguments, "--timeout", "3"))


@pytest.mark.parametrize(("family", "name"), FAMILIES.items(), ids=FAMILIES)
def test_a_staged_failure_is_known_for_what_it_is(family: str, name: str, stage: Stage) -> None:
    case = quick(BY_ID[name])
    found = judge(case, run_stage(case, stage))
    assert found.problems == (), found.line
    assert found.answer is not None
    assert found.answer.family == family, found.line


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_run_that_says_alarming_things_has_not_failed(name: str, stage: Stage) -> None:
    case = quick(BY_ID[name])
    found = judge(case, run_stage(case, stage))
    assert found.problems == (), found.line

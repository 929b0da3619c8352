"""The maker of jobs: planned once for each choice of GPUs, checked for the machine that runs it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from checked_jobs import Here, job_of

from pytest_megatron.errors import LaunchError
from pytest_megatron.runs.environment import gather_facts
from pytest_megatron.workloads.engine.api import Resources
from pytest_megatron.workloads.recipe.model import Workload
from pytest_megatron.workloads.training.checks.check import findings_of
from pytest_megatron.workloads.training.checks.rules import CheckFinding, RuleMatch
from pytest_megatron.workloads.training.plan.plan import Setting
from pytest_megatron.workloads.training.run.runner import ForwardingListener
from pytest_megatron.workloads.verdict.attempt import Attempt
from pytest_megatron.workloads.verdict.driver import begin

CASE = """\
TEST_TYPE: regular
MODEL_ARGS: {--num-layers: 4, --train-iters: 4}
"""


class NoRetries:
    """Grants none."""

    def claim(self, _attempt: Attempt) -> str | None:
        return "none"

    def on_retry(self, attempt: Attempt, pause_s: float) -> None:
        raise AssertionError(attempt, pause_s)


class CheckedPlace(Here):
    """A place that finds an error in every job."""

    def findings(
        self, _workload: Workload, _setting: Setting, _needed: Resources
    ) -> Sequence[CheckFinding]:
        return findings_of([RuleMatch("layout-heads", "recipes/r.yaml:7", heads=1, tp=2)])


def test_findings_of_an_engine_refuse_a_job_as_its_own_do(tmp_path: Path) -> None:
    checked = job_of(tmp_path, CASE, place=CheckedPlace())
    with pytest.raises(LaunchError, match="layout-heads"):
        checked.require_runnable()


def test_the_plan_of_the_first_attempt_is_made_once(tmp_path: Path) -> None:
    checked = job_of(tmp_path, CASE)
    assert checked.plan_of(repeat=1, number=1) is checked.plan
    second = checked.plan_of(repeat=1, number=2)
    assert second.dirs.root.name == "attempt_2"
    assert replace(second, phases=(), dirs=checked.plan.dirs) == replace(checked.plan, phases=())


def test_an_argument_names_the_gpus_that_are_leased(tmp_path: Path) -> None:
    text = CASE.replace("--train-iters: 4", "--train-iters: 4, --gpus: '${CUDA_VISIBLE_DEVICES}'")
    checked = job_of(tmp_path, text)
    (repeat,) = begin(checked, gather_facts(tmp_path), ForwardingListener(), NoRetries())
    planned = next(repeat).planned(("GPU-a", "GPU-b"))
    (phase,) = planned.plan.phases
    assert phase.argv[phase.argv.index("--gpus") + 1] == "GPU-a,GPU-b"
    assert phase.env["CUDA_VISIBLE_DEVICES"] == phase.own_env["CUDA_VISIBLE_DEVICES"]
    assert phase.own_env["CUDA_VISIBLE_DEVICES"] == "GPU-a,GPU-b"
    assert json.dumps(planned.description).count("GPU-a,GPU-b") >= 2


def test_a_missing_program_is_refused(tmp_path: Path) -> None:
    checked = job_of(tmp_path, CASE)
    (tmp_path / "train.py").unlink()
    with pytest.raises(LaunchError, match=r"train\.py"):
        checked.require_runnable()

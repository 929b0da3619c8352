"""Reads what an attempt left, and says what is wrong with it (effects: files)."""

from __future__ import annotations

import sys
from dataclasses import replace

from pytest_megatron.errors import MetricsError
from pytest_megatron.files import write_json_atomically
from pytest_megatron.golden.comparison import Comparison
from pytest_megatron.golden.generation import generation_to_json
from pytest_megatron.golden.store import write_metrics
from pytest_megatron.launch.case import CaseMode, WorkloadCase
from pytest_megatron.launch.checkpoints import iteration_name
from pytest_megatron.launch.plan import AttemptPlan
from pytest_megatron.verdict.attempt import Attempt, FailureCause, judge_attempt
from pytest_megatron.verdict.generated import judge_generation
from pytest_megatron.verdict.gradients import compare_gradients, measure_gradients
from pytest_megatron.verdict.job import WorkloadJob
from pytest_megatron.verdict.script_result import judge_script


def judge_files(job: WorkloadJob, plan: AttemptPlan, attempt: Attempt) -> Attempt:
    """Read what an attempt left, and say what is wrong with it."""
    if plan.script is not None and job.case is not None:
        return _judged_script(job, job.case, plan, attempt)
    mode = CaseMode.PRETRAINING if job.case is None else job.case.mode
    if mode is CaseMode.INFERENCE:
        generation, cause = judge_generation(
            attempt.ends,
            metric_names=job.metric_names or (),
            time_limit_s=plan.time_limit_s,
            table=job.table,
        )
        return replace(attempt, generation=generation, cause=cause)
    metrics, cause = judge_attempt(
        attempt.ends,
        metric_names=job.metric_names,
        time_limit_s=plan.time_limit_s,
        target=plan.target,
        is_rl=mode is CaseMode.RL,
        table=job.table,
    )
    for end, measured in zip(attempt.ends, metrics, strict=False):
        write_metrics(end.plan.dirs.metrics, measured)
    attempt = replace(attempt, metrics=metrics, cause=cause)
    if attempt.is_in_windows and metrics:
        write_metrics(attempt.whole_path, attempt.whole)
    return attempt if cause is not None else _with_gradients(job, attempt)


def _judged_script(
    job: WorkloadJob, case: WorkloadCase, plan: AttemptPlan, attempt: Attempt
) -> Attempt:
    """Read what a recipe's own script left."""
    (end,) = attempt.ends
    result = judge_script(
        end,
        case,
        attempt.dirs,
        metric_names=job.metric_names or (),
        is_lightweight=job.setting.is_lightweight or case.is_always_lightweight,
        time_limit_s=plan.time_limit_s,
    )
    for number, measured in enumerate(result.metrics, start=1):
        path = attempt.dirs.phase(number).metrics
        path.parent.mkdir(exist_ok=True)
        write_metrics(path, measured)
    if result.generation is not None:
        write_json_atomically(
            attempt.dirs.phase(1).generated, generation_to_json(result.generation)
        )
    return replace(
        attempt, metrics=result.metrics, generation=result.generation, cause=result.cause
    )


def _with_gradients(job: WorkloadJob, attempt: Attempt) -> Attempt:
    """Return a clean attempt with the comparison of its checkpoints, where it has any."""
    tolerance = job.gradient_tolerance
    if tolerance is None:
        return attempt
    saved = []
    for end in attempt.ends:
        assert end.plan.saves is not None
        assert end.plan.last_iteration is not None
        saved.append(end.plan.saves / iteration_name(end.plan.last_iteration))
    first, *others = saved
    try:
        measured = measure_gradients(sys.executable, first, others, job.setting.env)
    except MetricsError as error:
        return replace(attempt, cause=FailureCause(text=str(error)))
    name = attempt.ends[0].plan.name
    compared: list[tuple[str, tuple[Comparison, ...]]] = [
        (end.plan.name, compare_gradients(found, tolerance, name=name, where=str(first)))
        for end, found in zip(attempt.ends[1:], measured, strict=True)
    ]
    return replace(attempt, gradients=tuple(compared))

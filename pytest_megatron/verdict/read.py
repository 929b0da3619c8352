"""Reads what an attempt left, and says what is wrong with it (effects: files)."""

from __future__ import annotations

import sys
from dataclasses import replace

from pytest_megatron.base.files import write_json_atomically
from pytest_megatron.engines.api import SubmissionOutcome, TroubleKind
from pytest_megatron.errors import MetricsError
from pytest_megatron.golden.compare.result import Comparison
from pytest_megatron.golden.model import generation_to_json
from pytest_megatron.golden.store import write_metrics
from pytest_megatron.gpu.health import Health
from pytest_megatron.recipe.case import CaseMode, WorkloadCase
from pytest_megatron.triage.signatures import SIGNATURES, Signature, Table
from pytest_megatron.verdict.attempt import Attempt, FailureCause, judge_attempt, judge_generation
from pytest_megatron.verdict.gradients import compare_gradients, measure_gradients
from pytest_megatron.verdict.job import WorkloadJob
from pytest_megatron.verdict.script import judge_script
from pytest_megatron.workload.plan.checkpoints import iteration_name
from pytest_megatron.workload.plan.plan import AttemptPlan


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


_OOM = "cuda_oom"


def with_health(cause: FailureCause | None, health: Health | None) -> FailureCause | None:
    """Return a cause with what NVML and the kernel saw on the attempt's own GPUs.

    A failure of the hardware during the attempt is its cause, whatever the program says of it. An
    OOM on a GPU that another program held memory of is that program's, once.

    Args:
        cause: From the attempt's files; None for one that trained as it should.
        health: Of the attempt's GPUs; None where it had none.
    """
    if cause is None or health is None:
        return cause
    if health.faults:
        first = health.faults[0]
        return replace(
            cause,
            text=f"{first.text}; {cause.text}",
            evidence=(*(fault.text for fault in health.faults), *cause.evidence),
            signature=_signature(first.signature),
        )
    signature = cause.signature
    if signature is not None and signature.id == _OOM and health.foreign is not None:
        return replace(
            cause,
            text=f"{cause.text}; {health.foreign}",
            signature=replace(signature, is_transient=True, advice="end that process"),
        )
    return cause


def _signature(name: str) -> Signature:
    (found,) = (signature for signature in SIGNATURES if signature.id == name)
    return found


def cause_of(outcome: SubmissionOutcome, table: Table) -> FailureCause:
    """Return why an attempt that an engine did not bring to its end is no good.

    Args:
        outcome: With trouble.
        table: The signatures.
    """
    trouble = outcome.trouble
    assert trouble is not None
    row = table.engine(trouble.kind.value)
    if row is not None and trouble.is_transient is not None:
        row = replace(row, is_transient=trouble.is_transient)
    return FailureCause(
        text=trouble.text,
        evidence=trouble.evidence,
        signature=row,
        is_of_engine=trouble.kind is not TroubleKind.OUT_OF_MEMORY,
    )

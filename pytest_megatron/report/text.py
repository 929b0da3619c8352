"""What a person reads about a workload: the failure block, the summary line, the plan. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from pytest_megatron.golden.comparison import render
from pytest_megatron.golden.model import MetricMap
from pytest_megatron.launch.plan import AttemptPlan
from pytest_megatron.verdict.attempt import Attempt
from pytest_megatron.verdict.judge import Judgement, RepeatComparison
from pytest_megatron.verdict.training import Job, Training

_INDENT = "    "


def training_failure(training: Training) -> str:
    """Return why a training is no good: the cause, its evidence, what else was tried."""
    last = training.attempts[-1]
    assert last.cause is not None
    lines = [f"{training.job.node_id}: {last.cause.text}"]
    if last.cause.signature is not None:
        signature = last.cause.signature
        kind = "transient" if signature.is_transient else "not transient, so not run again"
        lines.append(f"known as {signature.id} ({kind}): {signature.advice}")
    lines += [f"{_INDENT}{line}" for line in last.cause.evidence]
    if training.stopped is not None:
        lines.append(f"not run again: {training.stopped}")
    for attempt in training.attempts[:-1]:
        if attempt.cause is not None:
            lines.append(f"attempt {attempt.number}: {attempt.cause.text}")
    return "\n".join(lines)


def mismatch(training: Training, judgement: Judgement) -> str:
    """Return which metrics disagree, where and by how much."""
    job = training.job
    lines = [f"{job.node_id}: trained to the end, but its metrics disagree"]
    for repeat in judgement.failed:
        if job.num_repeats > 1 or repeat.against != "golden":
            lines.append(f"repeat {repeat.repeat} against the {repeat.against}:")
        lines += [f"{_INDENT}{render(c)}" for c in repeat.failed]
        lines.append(f"{_INDENT}measured: {_measured(training, repeat)}")
    return "\n".join(lines)


def summary_line(
    training: Training, judgement: Judgement | None, problem: str | None = None
) -> str:
    """Return one line for the end of the run: loss, time, how it compares, what was odd."""
    parts = [f"{training.duration_s:.1f} s"]
    if training.clean and training.clean[0].metrics:
        parts += _loss(training.clean[0].metrics[0])
    if problem is not None:
        cause = training.attempts[-1].cause
        parts.append("metrics disagree" if cause is None else cause.text.partition("; ")[0])
    if judgement is not None:
        notes = [
            note if repeat.against == "golden" else f"resumed: {note}"
            for repeat in judgement.repeats
            for comparison in repeat.comparisons
            for note in comparison.notes
        ]
        parts += list(dict.fromkeys(notes))
    parts += [_retried(a) for a in training.attempts[:-1] if a.cause is not None]
    return ", ".join(parts)


def plan_text(job: Job, plan: AttemptPlan, golden: Path | None) -> str:
    """Return what would run, for `--plan`: the words can be pasted into a shell."""
    redactor = job.redactor
    lines = [
        job.node_id,
        f"  golden: {golden if golden is not None else 'none'}",
        f"  ranks: {plan.world_size} on {job.workload.platform}",
        f"  time limit: {plan.time_limit_s:g} s",
        f"  repeats: {job.num_repeats}, each with up to {job.retry.max_attempts} attempts",
        f"  directory: {plan.cwd}",
    ]
    for phase in plan.phases:
        if phase.rewind is not None:
            lines.append(f"  then back to iteration {phase.rewind.back_to}, and")
        env = redactor.env(phase.own_env)
        lines += [f"  {name}={shlex.quote(value)} \\" for name, value in env.items()]
        lines.append(f"  {shlex.join(redactor.words(phase.argv))}")
    if plan.script is not None:
        lines += [f"  | {line}" for line in redactor.text(plan.script).splitlines()]
    return "\n".join(lines)


def _measured(training: Training, repeat: RepeatComparison) -> Path:
    """Return the file of what a repeat measured in the phase that was compared."""
    (attempt,) = (a for a in training.clean if a.repeat == repeat.repeat)
    return attempt.dirs.phase(1 if repeat.against == "golden" else 2).metrics


def _loss(metrics: MetricMap) -> Sequence[str]:
    series = metrics.get("lm loss")
    if series is None or not len(series):
        return []
    first, last = series.values[0], series.values[-1]
    if isinstance(first, str) or isinstance(last, str):
        return []
    return [f"lm loss {first:.4f} -> {last:.4f} in {series.steps[-1]} iterations"]


def _retried(attempt: Attempt) -> str:
    assert attempt.cause is not None
    known = attempt.cause.signature.id if attempt.cause.signature is not None else "unknown"
    return f"attempt {attempt.number} failed: {known}"

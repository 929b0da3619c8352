"""The record of a workload in `run.json`. Pure."""

from __future__ import annotations

from pytest_megatron.runs.record import RecordedAttempt, RecordedHealth, RecordedWorkload
from pytest_megatron.runs.reproduce import headline_fingerprint
from pytest_megatron.verdict.attempt import Attempt
from pytest_megatron.verdict.compare import Judgement
from pytest_megatron.verdict.job import Training
from pytest_megatron.verdict.retry import fingerprint
from pytest_megatron.verdict.text import summary_line
from pytest_megatron.verdict.verdict import Verdict


def item_record(
    training: Training,
    judgement: Judgement | None,
    *,
    verdict: Verdict | None = None,
    problem: str | None = None,
    is_expected: bool = False,
) -> RecordedWorkload:
    """Return the record of a workload.

    Args:
        training: What ran.
        judgement: The comparisons, or None where there were none.
        verdict: The last word; None takes the training's own.
        problem: Why it did not pass, as printed.
        is_expected: Whether the problem is what the case expects, which passes.
    """
    summary = summary_line(training, judgement, problem)
    compared = judgement if judgement is not None and judgement.has_golden else None
    return RecordedWorkload(
        verdict=(verdict or training.verdict).value,
        problem=problem,
        is_expected=is_expected,
        summary=f"failed as expected: {summary}" if is_expected else summary,
        duration_s=round(training.duration_s, 3),
        directory=str(training.job.dirs.root),
        compared=compared is not None,
        policy=None if compared is None else compared.policy.as_json(),
        not_run_again=training.stopped,
        fingerprint=_fingerprint(training, judgement) if problem is not None else None,
        platform=training.job.workload.platform,
        attempts=tuple(_attempt_record(attempt) for attempt in training.attempts),
    )


def _fingerprint(training: Training, judgement: Judgement | None) -> str:
    """Return what two failures of a workload have in common that failed in the same way.

    Of a cause, what triage says of it; of a mismatch, the metrics that disagree.
    """
    cause = training.attempts[-1].cause
    if cause is not None:
        found = cause.diagnosis
        return headline_fingerprint(cause.text) if found is None else found.fingerprint
    repeats = () if judgement is None else judgement.failed
    names = sorted({f"{r.against}: {c.metric}" for r in repeats for c in r.failed})
    return f"mismatch|{', '.join(names)}" if names else "not as expected"


def _attempt_record(attempt: Attempt) -> RecordedAttempt:
    cause, health = attempt.cause, attempt.health
    signature = None if cause is None else cause.signature
    faults = () if health is None else tuple(fault.text for fault in health.faults)
    return RecordedAttempt(
        repeat=attempt.repeat,
        attempt=attempt.number,
        directory=str(attempt.dirs.root),
        duration_s=round(attempt.duration_s, 3),
        exit_codes=tuple(end.returncode for end in attempt.ends),
        num_left=sum(end.num_left for end in attempt.ends),
        cause=None if cause is None else cause.text,
        root_rank=None if cause is None else cause.rank,
        signature=None if signature is None else signature.id,
        is_transient=cause is not None and cause.is_transient,
        health=None if health is None else RecordedHealth(faults=faults, notes=health.notes),
        fingerprint=None if cause is None else fingerprint(cause),
    )

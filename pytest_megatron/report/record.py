"""The records of workloads and tests in `run.json`: verdict, attempts, where to look. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pytest_megatron.files import JsonValue
from pytest_megatron.gang.spec import GangSpec, RunEnd
from pytest_megatron.report.merge import Merged
from pytest_megatron.report.text import summary_line
from pytest_megatron.verdict.attempt import Attempt
from pytest_megatron.verdict.decide import Verdict
from pytest_megatron.verdict.judge import Judgement
from pytest_megatron.verdict.signature import Signature
from pytest_megatron.verdict.training import Training


def item_record(
    training: Training,
    judgement: Judgement | None,
    *,
    verdict: Verdict | None = None,
    problem: str | None = None,
) -> dict[str, JsonValue]:
    """Return what `run.json` says of a workload.

    Args:
        training: What ran.
        judgement: The comparisons, or None where there were none.
        verdict: The last word; None takes the training's own.
        problem: Why it did not pass, as printed.
    """
    return {
        "verdict": (verdict or training.verdict).value,
        "problem": problem,
        "summary": summary_line(training, judgement if problem is None else None, problem),
        "duration_s": round(training.duration_s, 3),
        "directory": str(training.job.dirs.root),
        "attempts": [_attempt_record(attempt) for attempt in training.attempts],
    }


def _attempt_record(attempt: Attempt) -> dict[str, JsonValue]:
    cause = attempt.cause
    signature = None if cause is None else cause.signature
    return {
        "repeat": attempt.repeat,
        "attempt": attempt.number,
        "directory": str(attempt.dirs.root),
        "duration_s": round(attempt.duration_s, 3),
        "exit_codes": [end.returncode for end in attempt.ends],
        "num_left": sum(end.num_left for end in attempt.ends),
        "cause": None if cause is None else cause.text,
        "root_rank": None if cause is None else cause.rank,
        "signature": None if signature is None else signature.id,
        "is_transient": cause is not None and cause.is_transient,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Executed:
    """One execution of a distributed test.

    Attributes:
        gang: Number of the gang it ran on, counted in the session.
        directory: Of the logs of that gang.
        signature: The transient cause for which it was run again, or None.
    """

    gang: int
    directory: str
    end: RunEnd
    signature: Signature | None = None


def test_record(
    merged: Sequence[Merged], spec: GangSpec, executions: Sequence[Executed]
) -> dict[str, JsonValue]:
    """Return what `run.json` says of a distributed test.

    Args:
        merged: The reports of its last execution.
        spec: The gang that it asked for.
        executions: All of them, the last one last.
    """
    failed = [m for m in merged if m.outcome == "failed"]
    is_skipped = any(m.outcome == "skipped" for m in merged)
    outcome = "failed" if failed else "skipped" if is_skipped else "passed"
    causes = [e.signature for e in executions if e.signature is not None]
    is_flaky = bool(causes) and outcome == "passed"
    return {
        "verdict": Verdict.FLAKY.value if is_flaky else outcome,
        "outcome": outcome,
        "problem": failed[0].message if failed else None,
        "duration_s": round(sum(max(0.0, m.stop - m.start) for m in merged), 3),
        "world_size": spec.world_size,
        "device": spec.device,
        "is_isolated": spec.is_isolated,
        "ranks": dict(failed[0].ranks) if failed else {},
        "attempts": [_execution_record(execution) for execution in executions],
    }


def _execution_record(executed: Executed) -> dict[str, JsonValue]:
    signature = executed.signature
    return {
        "gang": executed.gang,
        "directory": executed.directory,
        "duration_s": round(executed.end.duration_s, 3),
        "end": executed.end.reason.name.lower(),
        "is_gang_kept": executed.end.is_kept,
        "signature": None if signature is None else signature.id,
        "is_transient": signature is not None,
    }

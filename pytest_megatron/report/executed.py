"""The record of a distributed test in `run.json`: outcome, ranks, executions. Pure.

Loaded whenever tests run on gangs, so it imports nothing of workloads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pytest_megatron.files import JsonValue
from pytest_megatron.gang.spec import GangSpec, RunEnd
from pytest_megatron.report.again import headline_fingerprint
from pytest_megatron.report.merge import Merged
from pytest_megatron.verdict.signature import Signature


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
        "verdict": "flaky" if is_flaky else outcome,
        "outcome": outcome,
        "problem": failed[0].message if failed else None,
        "duration_s": round(sum(max(0.0, m.stop - m.start) for m in merged), 3),
        "world_size": spec.world_size,
        "device": spec.device,
        "is_isolated": spec.is_isolated,
        "fingerprint": _fingerprint(failed, executions) if failed else None,
        "ranks": dict(failed[0].ranks) if failed else {},
        "attempts": [_execution_record(execution) for execution in executions],
    }


def _fingerprint(failed: Sequence[Merged], executions: Sequence[Executed]) -> str:
    reason = executions[-1].end.reason.name.lower() if executions else ""
    return headline_fingerprint(failed[0].message, reason)


def _execution_record(executed: Executed) -> dict[str, JsonValue]:
    signature = executed.signature
    return {
        "gang": executed.gang,
        "run": executed.end.run,
        "directory": executed.directory,
        "duration_s": round(executed.end.duration_s, 3),
        "end": executed.end.reason.name.lower(),
        "is_gang_kept": executed.end.is_kept,
        "signature": None if signature is None else signature.id,
        "is_transient": signature is not None,
    }

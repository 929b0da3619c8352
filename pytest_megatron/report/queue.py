"""One line that says how far the workloads in a queue are, and when it is printed. Pure."""

from __future__ import annotations

from pytest_megatron.verdict.campaign import QueueProgress

_LEAST_SHARE = 0.05  # below it, what is left is a guess
_EVERY_S, _DETAIL_EVERY_S, _HEARTBEAT_S = 10.0, 60.0, 300.0
_MINUTES, _HOURS = 120, 7_200  # from so many seconds on


def is_due(since_s: float, *, has_new_counts: bool, has_new_detail: bool) -> bool:
    """Return whether a line is worth printing where none can be replaced: in the log of CI.

    CI systems end what is silent for 10 minutes; a reason for waiting may change all the time.

    Args:
        since_s: Since the last line.
        has_new_counts: Whether more or fewer have ended, run or wait than it says.
        has_new_detail: Whether the engine says something else, or a training has come further.
    """
    limit_s = _EVERY_S if has_new_counts else _DETAIL_EVERY_S if has_new_detail else _HEARTBEAT_S
    return since_s >= limit_s


def queue_text(engine: str, standing: QueueProgress, elapsed_s: float, progress: str = "") -> str:
    """Return the line.

    Args:
        engine: Name of the engine.
        standing: How far it is.
        elapsed_s: Since the workloads were submitted.
        progress: Of a training that runs, or "".
    """
    counts = [
        f"{standing.num_ended} of {standing.num_works} ended",
        f"{standing.num_running} running",
        f"{standing.num_waiting} waiting",
    ]
    if standing.num_held:
        counts.append(f"{standing.num_held} to be submitted")
    parts = [", ".join(counts)]
    if standing.detail:
        parts.append(standing.detail)
    if progress:
        parts.append(progress)
    share = standing.share_done
    if share is not None and _LEAST_SHARE <= share < 1:
        parts.append(f"about {_rough(elapsed_s * (1 - share) / share)} left")
    return f"{engine}: {'; '.join(parts)}"


def _rough(seconds: float) -> str:
    if seconds >= _HOURS:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.0f} min" if seconds >= _MINUTES else f"{seconds:.0f} s"

"""One line that says how far the workloads in a queue are. Pure."""

from __future__ import annotations

from pytest_megatron.verdict.campaign import Standing

_LEAST_SHARE = 0.05  # below it, what is left is a guess
_MINUTES, _HOURS = 120, 7_200  # from so many seconds on


def queue_text(engine: str, standing: Standing, elapsed_s: float) -> str:
    """Return the line.

    Args:
        engine: Name of the engine.
        standing: How far it is.
        elapsed_s: Since the workloads were submitted.
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
    share = standing.share_done
    if share is not None and _LEAST_SHARE <= share < 1:
        parts.append(f"about {_rough(elapsed_s * (1 - share) / share)} left")
    return f"{engine}: {'; '.join(parts)}"


def _rough(seconds: float) -> str:
    if seconds >= _HOURS:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.0f} min" if seconds >= _MINUTES else f"{seconds:.0f} s"

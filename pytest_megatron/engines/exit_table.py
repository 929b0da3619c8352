"""The table of ranks that failed, as torch.distributed.run ends its log with it. Pure.

Where srun starts the ranks nobody else prints it, and every reader of a launcher's log knows it.

Source: torch/distributed/elastic/multiprocessing/errors, ChildFailedError.format_msg().
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

_WIDTH = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExit:
    """How one rank ended that did not end well.

    Attributes:
        returncode: As `Popen.returncode`.
        time_s: When it was noticed, since the epoch.
    """

    rank: int
    local_rank: int
    host: str
    returncode: int
    pid: int
    time_s: float


def first_line(first: RankExit) -> str:
    """Return what is said of the first rank that failed, at once."""
    return (
        f"failed (exitcode: {first.returncode}) local_rank: {first.rank} (pid: {first.pid}) "
        f"of {first.host}"
    )


def format_table(program: str, exits: Sequence[RankExit]) -> list[str]:
    """Return the lines of the table; the first of the ranks is its root cause."""
    first, *others = exits
    rows = [line for number, e in enumerate(others, start=1) for line in _row(number, e)]
    return [
        "=" * _WIDTH,
        f"{program} FAILED",
        "-" * _WIDTH,
        "Failures:",
        *(rows or ["  <NO_OTHER_FAILURES>"]),
        "-" * _WIDTH,
        "Root Cause (first observed failure):",
        *_row(0, first),
        "=" * _WIDTH,
    ]


def _row(number: int, found: RankExit) -> list[str]:
    when = time.strftime("%Y-%m-%d_%H:%M:%S", time.localtime(found.time_s))
    return [
        f"[{number}]:",
        f"  time      : {when}",
        f"  host      : {found.host}",
        f"  rank      : {found.rank} (local_rank: {found.local_rank})",
        f"  exitcode  : {found.returncode} (pid: {found.pid})",
        "  error_file: <N/A>",
        f"  traceback : {_traceback(found)}",
    ]


def _traceback(found: RankExit) -> str:
    if found.returncode >= 0:
        return "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"
    try:
        name = signal.Signals(-found.returncode).name
    except ValueError:
        name = "unknown"
    return f"Signal {-found.returncode} ({name}) received by PID {found.pid}"

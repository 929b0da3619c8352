"""Writes the history of two weeks of nights into a project, as if eight H100 had run its rows."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

from pytest_megatron.runs.history import HistoryEntry, append

NIGHTS = range(14)
# Test case -> GPUs, minutes a week ago, minutes now, nights on which it found a fault.
ROWS: dict[str, tuple[int, int, int, tuple[int, ...]]] = {
    "pretrain": (8, 25, 30, (3, 9)),
    "resume": (8, 20, 20, (3,)),
    "layouts": (8, 12, 12, ()),
    "generate": (4, 6, 6, (12,)),
}


def main() -> None:
    """Write it where the project's runs would."""
    now = dt.datetime.now(dt.UTC)
    for night in NIGHTS:
        time = now - dt.timedelta(days=len(NIGHTS) - night, hours=-1)
        for case, (gpus, before, minutes, faults) in ROWS.items():
            seconds = 60.0 * (minutes if time > now - dt.timedelta(days=7) else before)
            entry = HistoryEntry(
                time=time.strftime("%Y-%m-%dT%H:%M:%SZ"),
                run=f"night-{night}",
                node_id=f"recipes/moe.yaml::{case}[dev-dgx_h100]",
                kind="workload",
                verdict="failed" if night in faults else "passed",
                num_attempts=1,
                causes=(),
                duration_s=seconds,
                commit=f"{night:040x}",
                is_dirty=False,
                platform="dgx_h100",
                num_devices=gpus,
                attempts_s=seconds,
                scope="L1",
                owners=("moe-team",),
            )
            append(Path(".pytest_megatron/history.jsonl"), [entry])


if __name__ == "__main__":
    main()

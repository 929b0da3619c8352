"""The line that says how far a queue is."""

from __future__ import annotations

import dataclasses

from pytest_megatron.workloads.items.queue import queue_text
from pytest_megatron.workloads.verdict.scheduler import QueueProgress

STANDING = QueueProgress(
    num_works=200,
    num_ended=12,
    num_running=3,
    num_waiting=85,
    num_held=100,
    detail="job 41_7 waits: Resources",
)


def test_the_line_has_counts_and_the_engines_words() -> None:
    assert queue_text("slurm", STANDING) == (
        "slurm: 12 of 200 ended, 3 running, 85 waiting, 100 to be submitted; "
        "job 41_7 waits: Resources"
    )
    bare = dataclasses.replace(STANDING, num_held=0, detail="")
    assert queue_text("slurm", bare) == "slurm: 12 of 200 ended, 3 running, 85 waiting"

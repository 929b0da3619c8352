"""The line that says how far a queue is."""

from __future__ import annotations

import dataclasses

import pytest

from pytest_megatron.workloads.items.queue import is_due, queue_text
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


@pytest.mark.parametrize(
    ("since_s", "counts", "detail", "is_printed"),
    [
        (9.0, True, True, False),
        (10.0, True, False, True),
        (59.0, False, True, False),
        (60.0, False, True, True),
        (299.0, False, False, False),
        (300.0, False, False, True),
    ],
)
def test_a_log_hears_of_counts_soon_of_reasons_later_and_always_that_it_goes_on(
    since_s: float, *, counts: bool, detail: bool, is_printed: bool
) -> None:
    assert is_due(since_s, has_new_counts=counts, has_new_detail=detail) is is_printed

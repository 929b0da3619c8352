"""The section of a workload's page."""

from __future__ import annotations

from pytest_megatron.layouts.report import section
from pytest_megatron.runs.record import (
    RecordedFakeRank,
    RecordedLayout,
    RecordedWorkload,
)


def test_a_workload_that_was_trained_has_no_section() -> None:
    assert section(RecordedWorkload(verdict="passed")) == ""


def test_ranks_have_memory_and_bytes_of_groups() -> None:
    ranks = (
        RecordedFakeRank(
            rank=0, peak=2048, parameters=1024, activations=1024, sent={"2": 1536, "8": 10}
        ),
        RecordedFakeRank(rank=4, end="<cut>", peak=1024, optimizer=1024, sent={"8": 10}),
    )
    layout = RecordedLayout(world_size=8, ranks=ranks, left_out=("2 calls",), num_compared=7)
    text = section(RecordedWorkload(verdict="failed", layout=layout))
    assert "2.0 KiB  ############  1.0 KiB" in text
    assert "2: 1.5 KiB, 8: 10 B" in text
    assert "&lt;cut&gt;" in text
    assert "2 of 8 ranks run, 7 calls compared" in text
    assert "not compared: 2 calls" in text

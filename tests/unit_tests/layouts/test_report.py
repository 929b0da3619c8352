"""The section of a workload's page."""

from __future__ import annotations

import re

from pytest_megatron.layouts.report import section
from pytest_megatron.runs.record import (
    RecordedFakeRank,
    RecordedLayout,
    RecordedWorkload,
)


def test_a_workload_that_was_trained_has_no_section() -> None:
    assert section(RecordedWorkload(verdict="passed")) == ""


def test_ranks_have_bars_of_memory_and_bytes_of_groups() -> None:
    ranks = (
        RecordedFakeRank(
            rank=0, peak=2048, parameters=1024, activations=1024, sent={"2": 1536, "8": 10}
        ),
        RecordedFakeRank(rank=4, peak=1024, optimizer=1024, sent={"8": 10}, layers=("layer 3",)),
    )
    layout = RecordedLayout(world_size=8, ranks=ranks, left_out=("2 calls",), num_compared=7)
    text = section(RecordedWorkload(verdict="failed", layout=layout))
    assert "2 of 8 ranks run, 7 calls compared" in text
    assert "<td>layer 3<td>" in text
    assert re.findall(r'<rect x="([\d.]+)" width="([\d.]+)"', text) == [
        *[("0.0", "120.0"), ("120.0", "0.0"), ("120.0", "0.0"), ("120.0", "120.0")],
        *[("0.0", "0.0"), ("0.0", "0.0"), ("0.0", "120.0"), ("120.0", "0.0")],
    ]
    assert "groups of 2<th class=n>a step, groups of 8" in text
    assert "<td class=n>1.5 KiB<td class=n>10 B" in text
    assert "<td class=n><td class=n>10 B" in text
    assert "Not compared: 2 calls" in text

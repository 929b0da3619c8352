from __future__ import annotations

import math

from pytest_megatron.workloads.golden.model import series_of
from pytest_megatron.workloads.refresh.pull_request import plot


def test_both_curves_and_their_distance_are_drawn() -> None:
    old = series_of({step: float(20 - step) for step in range(1, 11)})
    new = series_of({step: float(20 - step) + (step > 5) for step in range(1, 11)})
    assert plot(old, new, width=21, height=5).splitlines() == [
        "        19 ••",
        "             ••",
        "               ••+",
        "                 ·•+",
        "        10         ·•",
        "  +1.0e-01      ▆▇▇██",
        "  -1.0e-01",
        "      step 1       10",
    ]


def test_what_cannot_be_drawn_is_left_out() -> None:
    assert plot(None, series_of({1: math.nan})) == "(no finite value)"
    flat = plot(None, series_of({1: 2.0, 3: 2.0}), width=21, height=3)
    assert "·" not in flat
    assert flat.count("+") == 2
    zero = series_of({1: 0.0, 2: 1.0})
    assert "inf" not in plot(zero, series_of({1: 1.0, 2: 1.1}), width=30)

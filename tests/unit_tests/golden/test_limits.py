from __future__ import annotations

from pytest_megatron.golden.compare.limits import direction_of


def test_a_metric_gets_better_away_from_the_side_that_fails() -> None:
    names = ("lm loss", "iteration-time", "throughput", "mem-allocated-bytes", "grad-norm", "new")
    assert [direction_of(name) for name in names] == [
        *("lower_is_better", "lower_is_better", "higher_is_better"),
        *("lower_is_better", "either", "either"),
    ]

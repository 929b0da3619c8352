from __future__ import annotations

import math

from pytest_megatron.workloads.golden.build import combine, spread_of
from pytest_megatron.workloads.golden.model import Series, Value, series_of


def series(**values: Value) -> Series:
    """`series(s1=2.0)` has the value 2.0 at step 1."""
    return series_of({int(k[1:]): v for k, v in values.items()}, is_full_precision=True)


def test_a_golden_is_the_median_of_its_repeats_at_each_step() -> None:
    repeats = [{"lm loss": series(s1=a, s2=b)} for a, b in ((1.0, 5.0), (3.0, 6.0), (2.0, 9.0))]
    assert combine(repeats, ()) == {"lm loss": series(s1=2.0, s2=6.0)}


def test_what_not_every_repeat_has_is_left_out() -> None:
    first = {"lm loss": series(s1=1.0, s2=2.0, s3=3.0), "num-zeros": series(s1=1.0)}
    second = {"lm loss": series(s1=1.0, s3=math.nan)}
    assert combine([first, second], ()) == {"lm loss": series(s1=1.0)}


def test_other_metrics_are_kept_only_where_the_case_compares_them() -> None:
    run = {"learning-rate": series(s1=1.0), "lm loss": series(s1=1.0)}
    assert (list(combine([run], ())), list(combine([run], ["learning-rate"]))) == (
        ["lm loss"],
        ["learning-rate", "lm loss"],
    )


def test_norms_are_kept_where_every_repeat_has_them_at_every_step() -> None:
    whole = {"grad-norm": series(s1=1.0, s2=2.0), "lm loss": series(s1=1.0)}
    skipped = {"grad-norm": series(s1=1.0, s2=math.inf), "lm loss": series(s1=1.0)}
    without = {"lm loss": series(s1=1.0)}
    assert [list(combine([whole, other], ())) for other in (whole, skipped, without)] == [
        ["grad-norm", "lm loss"],
        ["lm loss"],
        ["lm loss"],
    ]


def test_equal_repeats_have_no_spread() -> None:
    run = {"lm loss": series(s1=1.0, s2=2.0)}
    assert spread_of([run, run], run) == {"lm loss": 0.0}


def test_the_spread_is_relative_to_the_golden_at_each_step() -> None:
    repeats = [{"lm loss": series(s1=a, s2=4.0)} for a in (9.0, 10.0, 11.0)]
    golden = combine(repeats, ())
    assert spread_of(repeats, golden) == {"lm loss": series(s1=0.1, s2=0.0)}

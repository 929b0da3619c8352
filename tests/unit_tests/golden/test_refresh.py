from __future__ import annotations

import math

import pytest

from pytest_megatron.golden.model import Series, Value, series_of
from pytest_megatron.golden.refresh import Change, changes, combine, markdown, spread_of


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
    run = {"grad-norm": series(s1=1.0), "lm loss": series(s1=1.0)}
    assert (list(combine([run], ())), list(combine([run], ["grad-norm"]))) == (
        ["lm loss"],
        ["grad-norm", "lm loss"],
    )


def test_equal_repeats_have_no_spread() -> None:
    run = {"lm loss": series(s1=1.0, s2=2.0)}
    assert spread_of([run, run], run) == {"lm loss": 0.0}


def test_the_spread_is_relative_to_the_golden_at_each_step() -> None:
    repeats = [{"lm loss": series(s1=a, s2=4.0)} for a in (9.0, 10.0, 11.0)]
    golden = combine(repeats, ())
    assert spread_of(repeats, golden) == {"lm loss": series(s1=0.1, s2=0.0)}


def test_changes_keep_the_sign_and_count_steps_that_are_new_or_gone() -> None:
    old = {"lm loss": series(s1=10.0, s2=10.0, s3=1.0), "same": series(s1=1.0)}
    new = {"lm loss": series(s1=11.0, s2=8.0, s4=1.0), "same": series(s1=1.0)}
    assert changes(old, new) == (
        Change(
            metric="lm loss",
            num_old=3,
            num_new=3,
            num_changed=4,
            largest_relative=0.2,
            mean_signed_relative=pytest.approx(-0.05),  # type: ignore[arg-type]
        ),
    )


def test_an_oscillation_is_seen_though_its_mean_is_nothing() -> None:
    """FORMATS 9.30: +50 % and -50 % cancel there."""
    (found,) = changes({"a": series(s1=10.0, s2=10.0)}, {"a": series(s1=15.0, s2=5.0)})
    assert (found.num_changed, found.largest_relative) == (2, 0.5)
    assert found.mean_signed_relative == 0.0


def test_a_metric_that_is_new_or_gone_is_a_change() -> None:
    found = changes({"a": series(s1=1.0)}, {"b": series(s1=1.0)})
    assert [(c.metric, c.num_old, c.num_new) for c in found] == [("a", 1, 0), ("b", 0, 1)]


def test_the_table_for_a_pull_request() -> None:
    change = changes({"lm loss": series(s1=10.0)}, {"lm loss": series(s1=11.0)})
    assert markdown({"c.json": None, "b.json": (), "a.json": change}).splitlines() == [
        "| golden | metric | steps | changed | largest | mean, signed |",
        "|---|---|---:|---:|---:|---:|",
        "| a.json | lm loss | 1 -> 1 | 1 | 1.0e-01 | +1.0e-01 |",
        "| b.json | unchanged | | 0 | | |",
        "| c.json | new | | | | |",
    ]

"""What a page's script gets: every value that fits, every extreme where not all do."""

from __future__ import annotations

import base64
import json
import math
import struct
from dataclasses import replace

import pytest
from made_run import changed, curve

from pytest_megatron.base.files import JsonValue
from pytest_megatron.pages.chart import choose, shares
from pytest_megatron.pages.item_page import encode_charts
from pytest_megatron.pages.model import Chart, Curve, CurveRole, MetricFinding
from pytest_megatron.runs.record import RecordedMetric
from pytest_megatron.workloads.golden.model import Series, series_of


def chart(golden: Series, *runs: Series, first: int | None = None) -> Chart:
    curves = [Curve(name="golden", role=CurveRole.GOLDEN, series=golden)]
    curves += [
        Curve(name=f"repeat {n}", role=CurveRole.RUN, series=s) for n, s in enumerate(runs, 1)
    ]
    found = MetricFinding(
        repeat=1,
        against="golden",
        record=RecordedMetric(metric="lm loss", passed=False, rule="band", first_step=first),
    )
    return Chart(metric="lm loss", curves=tuple(curves), findings=() if first is None else (found,))


def encoded(one: Chart, **more: int) -> dict[str, JsonValue]:
    (result,) = encode_charts([one], **more)
    assert isinstance(result, dict)
    return result


def steps_of(result: dict[str, JsonValue]) -> list[int]:
    s = result["s"]
    assert isinstance(s, dict)
    num, first = s["n"], s["first"]
    assert isinstance(num, int)
    assert isinstance(first, int)
    if "every" in s:
        assert isinstance(s["every"], int)
        return [first + i * s["every"] for i in range(num)]
    (kind,) = {"d1", "d2", "d4"} & s.keys()
    gaps = struct.unpack(
        f"<{num - 1}{ {'d1': 'B', 'd2': 'H', 'd4': 'I'}[kind] }", base64.b64decode(str(s[kind]))
    )
    return [first + sum(gaps[:i]) for i in range(num)]


def values_of(result: dict[str, JsonValue], number: int) -> list[float]:
    curves = result["c"]
    assert isinstance(curves, list)
    one = curves[number]
    assert isinstance(one, dict)
    values = one["v"]
    assert isinstance(values, dict)
    if "as" in values:
        assert isinstance(values["as"], int)
        return values_of(result, values["as"])
    packed = base64.b64decode(str(values.get("f4") or values["f8"]))
    return [v for (v,) in struct.iter_unpack("<f" if "f4" in values else "<d", packed)]


def test_a_short_curve_is_kept_whole_as_float32() -> None:
    golden, run = curve(100), curve(100, seed=1)
    result = encoded(chart(golden, run))
    assert steps_of(result) == list(golden.steps)
    assert values_of(result, 1) == pytest.approx(run.values, rel=1e-7)
    assert "of" not in result


def test_equal_curves_are_there_once() -> None:
    result = encoded(chart(curve(100), curve(100), curve(100)))
    curves = result["c"]
    assert isinstance(curves, list)
    assert [c["v"] for c in curves[1:] if isinstance(c, dict)] == [{"as": 0}, {"as": 0}]


def test_a_constant_is_one_number_and_large_whole_numbers_stay_exact() -> None:
    memory = series_of(dict.fromkeys(range(1, 50), 12345678901.0))
    moved = changed(memory, {7: 12345678902.0})
    result = encoded(chart(memory, moved))
    curves = result["c"]
    assert isinstance(curves, list)
    assert isinstance(curves[0], dict)
    assert curves[0]["v"] == {"all": 12345678901.0}
    assert values_of(result, 1)[6] == 12345678902.0


def test_what_is_no_number_is_named_and_missing_is_another_thing_than_nan() -> None:
    golden = curve(10)
    run = changed(golden, {3: math.nan, 4: math.nan, 6: -math.inf, 7: "nan", 9: None, 10: None})
    curves = encoded(chart(golden, run))["c"]
    assert isinstance(curves, list)
    assert isinstance(curves[1], dict)
    assert curves[1]["o"] == [[2, 2, "nan"], [5, 1, "-inf"], [6, 1, "text"], [8, 2, "missing"]]


def test_a_resumed_curve_lacks_nothing_before_its_start() -> None:
    late = Curve(name="phase 2", role=CurveRole.RUN, series=curve(20).after(10), is_resumed=True)
    one = chart(curve(20))
    curves = encoded(replace(one, curves=(*one.curves, late)))["c"]
    assert isinstance(curves, list)
    assert isinstance(curves[1], dict)
    assert curves[1]["o"] == [[0, 10, "before"]]


def test_a_long_curve_keeps_every_kind_of_extreme() -> None:
    golden = curve(10_000)
    spiked = changed(golden, {5_003: 900.0, 7_001: -900.0, 8_888: math.nan})
    result = encoded(chart(golden, spiked, first=4_321), most_bytes=20_000)
    steps = steps_of(result)
    assert {5_003, 7_001, 8_888, 10_000} <= set(steps)
    assert {*range(1, 21), *range(4_261, 4_382)} <= set(steps)  # the start, and around a bad step
    assert result["of"] == 10_000
    assert values_of(result, 1)[steps.index(5_003)] == 900.0
    assert len(json.dumps(result)) < 25_000


def test_a_deviation_that_no_curve_shows_is_kept() -> None:
    steps = range(1, 10_001)
    golden = series_of({s: math.sin(s / 20) * 100 for s in steps})
    shifted = changed(golden, {6_000: float(dict(golden.items())[6_000]) + 0.5})
    assert 6_000 in steps_of(encoded(chart(golden, shifted), most_bytes=20_000))


def test_a_page_of_many_long_charts_stays_small() -> None:
    charts = [chart(curve(10_000, seed=n), curve(10_000, seed=n + 1)) for n in range(8)]
    assert len(json.dumps(encode_charts(charts))) < 300_000


def test_a_chart_that_needs_little_leaves_the_rest_to_others() -> None:
    assert shares([10, 1_000, 400], 900) == [10, 490, 400]


def test_steps_at_odd_places_come_back() -> None:
    steps = {1: 1.0, 2: 2.0, 300: 3.0, 90_000: 4.0}
    assert steps_of(encoded(chart(series_of(steps)))) == list(steps)


def test_nothing_but_nan_in_a_part_hides_nothing_after_it() -> None:
    column = [math.nan] * 500 + [float(i) for i in range(500)]
    kept = choose([column], most=50)
    assert {0, 500, 999} <= set(kept)
    assert len(kept) <= 52

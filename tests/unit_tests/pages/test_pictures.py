"""Charts: where lines are, in SVG by itself."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET

import pytest
from made_run import changed, curve

from pytest_megatron.pages.chart import chart_svg, scale_of
from pytest_megatron.pages.model import Chart, Curve, CurveRole
from pytest_megatron.workloads.golden.model import Series, series_of

SVG = "{http://www.w3.org/2000/svg}"
EVIL = '"/><script>alert(1)</script>&\x00'


def picture(golden: Series | None, *runs: Series) -> ET.Element:
    curves = [] if golden is None else [Curve(name="golden", role=CurveRole.GOLDEN, series=golden)]
    curves += [
        Curve(name=f"repeat {n}", role=CurveRole.RUN, series=s) for n, s in enumerate(runs, 1)
    ]
    return ET.fromstring(chart_svg(Chart(metric="lm loss", curves=tuple(curves))))  # noqa: S314


def paths(root: ET.Element, colour: str) -> list[str]:
    found = root.iter(f"{SVG}path")
    return [p.attrib["d"] for p in found if p.get("stroke") == colour and p.get("stroke-width")]


def points(path: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"[ML]?([\d.]+) ([\d.]+)", path)]


def test_a_line_is_where_its_numbers_say() -> None:
    straight = series_of({s: 10.0 - s for s in range(1, 11)})
    bent = changed(straight, {6: 9.0})
    root = picture(straight, bent)
    _, _, run = paths(root, "#0063b2")[:3]
    (golden, *_), (strip, *_) = [points(p) for p in paths(root, "#b07d00")[1:]], [points(run)]
    assert [x for x, _ in golden] == pytest.approx([72 + 672 * i / 9 for i in range(10)], abs=0.1)
    assert golden[0][1] < golden[-1][1]
    assert strip[5][1] < strip[4][1] == pytest.approx(strip[6][1])


def test_gaps_and_what_is_no_number_are_seen() -> None:
    golden = curve(40)
    run = changed(golden, {10: math.nan, 20: None, 21: None, 30: "nan"})
    root = picture(golden, run)
    words = {t.text for t in root.iter(f"{SVG}title")}
    assert {"nan", "no value", "text"} <= words
    line = paths(root, "#0063b2")[1]
    assert line.count("M") == 4


def test_a_golden_of_every_fifth_step_is_one_line() -> None:
    root = picture(curve(40, every=5), curve(40))
    assert [p.count("M") for p in paths(root, "#b07d00")[1:]] == [1]
    assert paths(root, "#0063b2")[1].count("M") == 1


@pytest.mark.parametrize(
    "series",
    [
        pytest.param(series_of({1: 1.0}), id="one step"),
        pytest.param(series_of({1: math.nan}), id="no number"),
        pytest.param(series_of({1: 1e308, 2: -1e308}), id="huge"),
        pytest.param(series_of({1: 0.0, 2: 0.0}), id="constant"),
        pytest.param(series_of({1: 1e-300, 2: 2e-300}), id="tiny"),
        pytest.param(series_of({10**15: 1.0, 10**15 + 1: 2.0}), id="late"),
    ],
)
def test_odd_curves_are_drawn(series: Series) -> None:
    assert picture(series, series) is not None
    assert picture(None, series) is not None


def test_a_long_curve_is_a_small_picture_and_keeps_its_spike() -> None:
    run = changed(curve(10_000), {5_000: 100.0})
    svg = chart_svg(Chart(metric="x", curves=(Curve(name="run", role=CurveRole.RUN, series=run),)))
    assert len(svg) < 40_000
    heights = [y for _, y in points(paths(ET.fromstring(svg), "#0063b2")[1])]  # noqa: S314
    assert min(heights) < sorted(heights)[1] - 50


def test_ticks_are_round_and_tell_neighbours_apart() -> None:
    assert [w for _, w in scale_of([0.0, 1.0], start=0, end=1, pad=0).ticks(5)] == [
        *("0", "0.2", "0.4", "0.6", "0.8", "1.0")
    ]
    words = [w for _, w in scale_of([1e10, 1e10 + 5], start=0, end=1).ticks(5)]
    assert len(set(words)) > 1


def test_names_stay_text_in_a_picture() -> None:
    chart = Chart(metric=EVIL, curves=(Curve(name=EVIL, role=CurveRole.GOLDEN, series=curve(5)),))
    root = ET.fromstring(chart_svg(chart))  # noqa: S314
    assert [e.tag for e in root.iter() if "script" in e.tag] == []

"""Pages in a real browser: what is drawn where, and what mouse and keys do."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser, chromium, find_chromium, pixels
from click.testing import CliRunner
from made_run import MadeRun, changed, curve

from pytest_megatron.base.files import JsonValue
from pytest_megatron.cli import group
from pytest_megatron.workloads.golden.model import MetricMap, series_of

PROGRAM = find_chromium()
pytestmark = pytest.mark.skipif(
    PROGRAM is None, reason="needs Chromium; .ci/install-chromium installs it"
)
EVIL = "<img src=x onerror=alert(1)></script><script>document.title='gone'</script>"
STEPS = 101
# What a chart has drawn, in units of its own: the curve, its frame, its labels.
DRAWN = """(() => {
  const svg = document.querySelectorAll("svg.plot")[%d];
  const box = (node) => { const b = node.getBBox(); return [b.x, b.y, b.x + b.width, b.y + b.height]; };
  return {
    frames: [...svg.querySelectorAll(".frame")].map(box),
    curves: Object.fromEntries([...svg.querySelectorAll("[data-curve]")].map((p) => [p.dataset.curve, p.getAttribute("d")])),
    off: Object.fromEntries([...svg.querySelectorAll("[data-off]")].map((p) => [p.dataset.off, box(p)])),
    texts: [...svg.querySelectorAll("text")].map((t) => t.textContent),
    first: [...svg.querySelectorAll("path.first")].map(box),
  };
})()"""  # noqa: E501


def line(first: float, last: float) -> MetricMap:
    """A straight line, so that every place on a chart can be told."""
    values = {s: first + (last - first) * (s - 1) / (STEPS - 1) for s in range(1, STEPS + 1)}
    return {"lm loss": series_of(values, is_full_precision=True)}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = MadeRun(root=tmp_path_factory.mktemp("browser") / "run")
    golden = {**line(10, 2), "num-zeros": curve(STEPS)}
    bad = {**golden, "lm loss": changed(golden["lm loss"], {41: 8.8, 60: math.nan, 81: None})}
    run.item("recipes/a.yaml::bad[dev-cpu]", [golden, bad], golden=golden)
    long = {f"metric {n}": curve(10_000, seed=n) for n in range(8)}
    run.item("recipes/a.yaml::long[dev-cpu]", [long], golden=long)
    evil = {EVIL: curve(5)}
    run.item(f"recipes/a.yaml::{EVIL}", [evil], golden=evil, problem=EVIL)
    run.test(f"tests/test_{EVIL}", "failed", {"0": EVIL})
    assert CliRunner().invoke(group, ["runs", "report", str(run.write())]).exit_code == 0
    return run.root


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    assert PROGRAM is not None
    with chromium(PROGRAM) as found:
        yield found


def page(root: Path, name: str) -> Path:
    (found,) = root.glob(f"*{name}*/curves.html")
    return found


def drawn(browser: Browser, number: int = 0) -> dict[str, JsonValue]:
    found = browser.run(DRAWN % number)
    assert isinstance(found, dict)
    return found


def points(path: JsonValue) -> list[tuple[float, float]]:
    parts = re.sub("m[^ML]*", "", str(path)).replace("M", "L").split("L")
    return [(float(x), float(y)) for x, y in (part.split() for part in parts if part)]


def steps_shown(browser: Browser) -> list[int]:
    texts = drawn(browser)["texts"]
    assert isinstance(texts, list)
    words = [str(text) for text in texts[: texts.index("step")]]
    return [int(word) for word in words if word.isdecimal() and int(word) > 10]


def centre(browser: Browser, share: float) -> tuple[float, float]:
    """A place in the first chart, at a share of its steps."""
    found = browser.run(
        'document.querySelector("svg.plot").scrollIntoView({block: "center"});'
        '(() => { const b = document.querySelector("svg.plot .frame").getBoundingClientRect();'
        " return [b.left, b.width, b.top + b.height / 2]; })()"
    )
    assert isinstance(found, list)
    left, width, y = (float(str(v)) for v in found)
    return left + width * share, y


def test_a_page_asks_for_nothing_and_complains_of_nothing(browser: Browser, root: Path) -> None:
    for path in (root / "index.html", *sorted(root.glob("*/curves.html"))):
        browser.open(path)
        assert browser.requests == [path.resolve().as_uri()]
        assert browser.complaints == []


def test_lines_are_where_the_data_says(browser: Browser, root: Path) -> None:
    browser.open(page(root, "bad"))
    found = drawn(browser)
    assert isinstance(found["curves"], dict)
    golden = points(found["curves"]["golden"])
    assert len(golden) == STEPS
    frames = found["frames"]
    assert isinstance(frames, list)
    main = frames[0]
    assert isinstance(main, list)
    left, top, right, bottom = (float(str(v)) for v in main)
    assert (golden[0][0], golden[-1][0]) == pytest.approx((left, right), abs=0.2)
    assert top < golden[0][1] < golden[50][1] < golden[-1][1] < bottom
    slopes = {round((b[1] - a[1]) / (b[0] - a[0]), 1) for a, b in zip(golden, golden[5:])}  # noqa: B905
    assert len(slopes) == 1  # straight
    observed = dict(zip(range(1, 200), points(found["curves"]["repeat 2"]), strict=False))
    share = (golden[0][1] - observed[41][1]) / (golden[0][1] - golden[-1][1])
    assert share == pytest.approx((10 - 8.8) / (10 - 2), abs=0.01)


def test_the_first_bad_step_and_what_is_no_number_are_marked(browser: Browser, root: Path) -> None:
    browser.open(page(root, "bad"))
    found = drawn(browser)
    texts = found["texts"]
    assert isinstance(texts, list)
    assert {"first off: step 60", "nan", "no value"} <= set(map(str, texts))
    first, frames = found["first"], found["frames"]
    assert isinstance(first, list)
    assert isinstance(frames, list)
    (mark,), frame = first, frames[0]
    assert isinstance(mark, list)
    assert isinstance(frame, list)
    left, _, right, _ = (float(str(v)) for v in frame)
    assert float(str(mark[0])) == pytest.approx(left + (right - left) * 59 / 100, abs=0.3)
    off = found["off"]
    assert isinstance(off, dict)
    assert off.keys() == {"repeat 1", "repeat 2"}


def test_colours_follow_the_system(browser: Browser, root: Path) -> None:
    for scheme, back, golden in (
        ("light", b"\xff\xff\xff", b"\xb0\x7d\x00"),
        ("dark", b"\x0d\x11\x17", b"\xf0\xb4\x29"),
    ):
        browser.use_colours(scheme)
        browser.open(page(root, "bad"), width=900, height=900)
        browser.run("document.querySelectorAll('#legend input').forEach((b, n) => n && b.click())")
        x, y = centre(browser, 0.5)
        _, _, rows = pixels(browser.screenshot(clip=(x - 2, y - 90, 5, 180)))
        assert golden in {row[6:9] for row in rows}
        _, _, rows = pixels(browser.screenshot(clip=(0, 0, 4, 4)))
        assert rows[1][:3] == back
    browser.use_colours("light")


def test_wheel_drag_and_double_click_move_the_steps_of_all_charts(
    browser: Browser, root: Path
) -> None:
    browser.open(page(root, "bad"))
    whole = steps_shown(browser)
    browser.mouse("mouseWheel", *centre(browser, 0.5), deltaX=0, deltaY=-100)
    assert steps_shown(browser) == whole  # a page that is scrolled past is left alone
    browser.drag(centre(browser, 0.5), centre(browser, 0.75))
    picked = steps_shown(browser)
    assert 48 <= picked[0] <= 55
    assert 70 <= picked[-1] <= 78
    other = points(dict(drawn(browser, 1)["curves"])["golden"])  # type: ignore[arg-type]
    assert len(other) < 40
    browser.drag(centre(browser, 0.25), centre(browser, 0.75))
    assert steps_shown(browser)[0] < picked[0]
    browser.mouse("mouseWheel", *centre(browser, 0.5), deltaX=0, deltaY=-100)
    assert len(points(dict(drawn(browser)["curves"])["golden"])) < 27  # type: ignore[arg-type]
    for count in (1, 2):
        browser.mouse("mousePressed", *centre(browser, 0.5), button="left", clickCount=count)
        browser.mouse("mouseReleased", *centre(browser, 0.5), button="left", clickCount=count)
    assert steps_shown(browser) == whole


def test_hovering_tells_values_and_what_is_allowed(browser: Browser, root: Path) -> None:
    browser.open(page(root, "bad"))
    browser.mouse("mouseMoved", *centre(browser, 0.4))
    told = browser.run('document.querySelector(".readout").innerText')
    assert isinstance(told, str)
    assert told.startswith("step 41")
    assert "golden\t6.8" in told
    assert "repeat 2\t8.8\t+2.9e-1" in told
    assert "allowed\t" in told
    assert browser.run(
        "(() => { const chart = document.querySelector('.chart');"
        " const [a, b] = ['svg.plot', '.readout'].map((name) =>"
        " chart.querySelector(name).getBoundingClientRect());"
        " return a.left <= b.left && a.top <= b.top && b.right <= a.right && b.bottom <= a.bottom;"
        " })()"
    )  # the readout is within the picture


def test_everything_can_be_done_with_keys(browser: Browser, root: Path) -> None:
    browser.open(page(root, "bad"))
    browser.run('document.querySelector("svg.plot").focus()')
    browser.press("End")
    browser.press("ArrowLeft")
    told = str(browser.run('document.querySelector(".readout").innerText'))
    assert told.startswith(f"step {STEPS - 1}")
    browser.press("+")
    assert len(points(dict(drawn(browser)["curves"])["golden"])) < 70  # type: ignore[arg-type]
    browser.press("0")
    assert len(points(dict(drawn(browser)["curves"])["golden"])) == STEPS  # type: ignore[arg-type]
    before = drawn(browser)["curves"]
    browser.press("l")
    assert drawn(browser)["curves"] != before
    browser.run('document.querySelector("#legend input").click()')
    curves = drawn(browser)["curves"]
    assert isinstance(curves, dict)
    assert sorted(curves) == ["repeat 1", "repeat 2"]


def test_names_and_logs_stay_text(browser: Browser, root: Path) -> None:
    for path in (root / "index.html", page(root, "img")):
        browser.open(path)
        assert browser.run("document.querySelectorAll('img').length") == 0
        assert browser.run("document.title") != "gone"
        assert EVIL in str(browser.run("document.body.innerText")).replace("\n", " ")
        assert browser.complaints == []


def test_a_script_that_got_in_is_not_run(browser: Browser, root: Path) -> None:
    content = (root / "index.html").read_text()
    broken = root / "broken.html"
    broken.write_text(content.replace("<h1>", f"{EVIL}<h1>"))
    browser.open(broken)
    assert browser.run("document.title") != "gone"
    assert any("Content Security Policy" in c for c in browser.complaints)
    assert browser.blocked == ["csp"]  # the picture that it asked for
    broken.unlink()


def test_eight_charts_of_10000_steps_open_and_zoom(browser: Browser, root: Path) -> None:
    path = page(root, "long")
    assert path.stat().st_size < 400_000
    browser.open(path, width=420, height=800)
    assert browser.run('document.querySelectorAll("svg.plot [data-curve]").length') == 16
    wide = browser.run("document.documentElement.scrollWidth")
    assert wide == 420  # nothing sticks out on a narrow screen
    browser.drag(centre(browser, 0.5), centre(browser, 0.55))
    golden = points(dict(drawn(browser)["curves"])["golden"])  # type: ignore[arg-type]
    assert len(golden) > 20
    notes = browser.run('document.querySelector(".chart").innerText')
    assert "of 10000 steps are drawn" in str(notes)


def test_the_index_filters_and_sorts(browser: Browser, root: Path) -> None:
    browser.open(root / "index.html")
    shown = (
        "[...document.querySelectorAll('#items tbody tr')].filter((r) => !r.hidden)"
        ".map((r) => r.cells[1].querySelector('a').textContent)"
    )
    names = browser.run(shown)
    assert isinstance(names, list)
    assert len(names) == 3
    assert str(names[0]).endswith(("bad[dev-cpu]", "</script>"))
    browser.run(
        "(() => { const f = document.getElementById('filter'); f.value = 'LONG dev';"
        " f.dispatchEvent(new Event('input')); })()"
    )
    assert browser.run(shown) == ["recipes/a.yaml::long[dev-cpu]"]
    assert browser.run("document.getElementById('count').textContent") == "1 of 3 items"
    browser.run(
        "(() => { const f = document.getElementById('filter'); f.value = '';"
        " f.dispatchEvent(new Event('input')); })()"
    )
    browser.run("document.querySelectorAll('#items th button')[3].click()")
    times = browser.run(
        "[...document.querySelectorAll('#items tbody tr')].map((r) => r.cells[3].textContent)"
    )
    assert times == ["1.0 s", "2.0 s", "3.0 s"]
    assert json.dumps(browser.complaints) == "[]"

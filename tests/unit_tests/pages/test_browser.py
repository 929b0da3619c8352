"""Pages in a real browser: what is drawn, and that nothing else runs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser, chromium, find_chromium
from click.testing import CliRunner
from made_run import MadeRun, changed, curve

from pytest_megatron.cli import group
from pytest_megatron.workloads.golden.model import MetricMap, series_of

PROGRAM = find_chromium()
pytestmark = pytest.mark.skipif(
    PROGRAM is None, reason="needs Chromium; .ci/install-chromium installs it"
)
EVIL = "<img src=x onerror=alert(1)></script><script>document.title='gone'</script>"
STEPS = 101
# The first chart in units of its own: lines by their colour, its labels.
DRAWN = """(() => {
  const svg = document.querySelector(".chart svg");
  const lines = [...svg.querySelectorAll("path[stroke-linejoin]")].filter((p) => p.getBBox().height > 0);
  return {
    lines: lines.map((p) => [p.getAttribute("stroke"), p.getAttribute("d")]),
    texts: [...svg.querySelectorAll("text, path title")].map((t) => t.textContent),
  };
})()"""  # noqa: E501

STICKING_OUT = """[...document.querySelectorAll("table, td, p, pre")]
  .filter((e) => e.getBoundingClientRect().right > innerWidth).map((e) => e.textContent)"""
COVERED = """[...document.querySelectorAll("svg")].flatMap((svg) => {
  const all = [...svg.querySelectorAll("text")].map((t) => [t.getBoundingClientRect(), t]);
  return all.filter(([a, t], i) => all.slice(i + 1).some(([b]) => a.left < b.right - 1
    && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1))
    .map(([, t]) => t.textContent);
})"""
LABEL = "getComputedStyle(document.querySelector('#items td:last-child'), '::before').content"


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
    named = f"recipes/a.yaml::{'gpt3_mcore_tp2_pp2_' * 6}[dev-dgx_h100]"
    run.item(named, [bad, bad, bad], golden=golden)
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


def test_a_page_asks_for_nothing_and_complains_of_nothing(browser: Browser, root: Path) -> None:
    for path in (root / "index.html", *sorted(root.glob("*/curves.html"))):
        browser.open(path)
        assert browser.requests == [path.resolve().as_uri()]
        assert browser.complaints == []


def test_curves_and_the_first_bad_step_are_drawn(browser: Browser, root: Path) -> None:
    browser.open(page(root, "bad"), width=1280, height=900)
    found = browser.run(DRAWN)
    assert isinstance(found, dict)
    lines, texts = found["lines"], found["texts"]
    assert isinstance(lines, list)
    assert isinstance(texts, list)
    colours = {line[0] for line in lines if isinstance(line, list)}
    assert colours >= {"#b07d00", "#0063b2", "#00795c"}
    assert {"first off: step 60", "nan", "no value"} <= set(map(str, texts))
    told = str(browser.run("document.querySelector('.chart').innerText"))
    assert "failed: nan" in told
    assert "repeat 2: step 60: observed nan" in told
    assert browser.complaints == []


def test_colours_follow_the_system(browser: Browser, root: Path) -> None:
    colour = "getComputedStyle(document.querySelector('.chart svg path[stroke-linejoin]')).stroke"
    back = "getComputedStyle(document.querySelector('.chart svg rect')).fill"
    for scheme, golden, ground in (
        ("light", "rgb(176, 125, 0)", "rgb(255, 255, 255)"),
        ("dark", "rgb(240, 180, 41)", "rgb(13, 17, 23)"),
    ):
        browser.use_colours(scheme)
        browser.open(page(root, "bad"), width=900, height=900)
        assert (browser.run(colour), browser.run(back)) == (golden, ground)
    browser.use_colours("light")


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


def test_eight_charts_of_10000_steps_fit_a_narrow_screen(browser: Browser, root: Path) -> None:
    path = page(root, "long")
    assert path.stat().st_size < 600_000
    browser.open(path, width=420, height=800)
    assert browser.run('document.querySelectorAll(".chart svg").length') == 8
    wide = browser.run("document.documentElement.scrollWidth")
    assert wide == 420  # nothing sticks out


def test_a_telephone_clips_no_table_and_no_label_covers_another(
    browser: Browser, root: Path
) -> None:
    for path in (root / "index.html", *sorted(root.glob("*/curves.html"))):
        browser.open(path, width=390, height=844)
        assert browser.run(STICKING_OUT) == []
        assert browser.run(COVERED) == []
    browser.open(root / "index.html", width=390, height=844)
    assert "attempts" in str(browser.run(LABEL))


def test_the_index_filters_and_sorts(browser: Browser, root: Path) -> None:
    browser.open(root / "index.html")
    shown = (
        "[...document.querySelectorAll('#items tbody tr')].filter((r) => !r.hidden)"
        ".map((r) => r.cells[1].querySelector('a').textContent)"
    )
    names = browser.run(shown)
    assert isinstance(names, list)
    assert len(names) == 4
    assert str(names[0]).endswith(("bad[dev-cpu]", "</script>"))
    browser.run(
        "(() => { const f = document.getElementById('filter'); f.value = 'LONG dev';"
        " f.dispatchEvent(new Event('input')); })()"
    )
    assert browser.run(shown) == ["recipes/a.yaml::long[dev-cpu]"]
    assert browser.run("document.getElementById('count').textContent") == "1 of 4 items"
    browser.run(
        "(() => { const f = document.getElementById('filter'); f.value = '';"
        " f.dispatchEvent(new Event('input')); })()"
    )
    browser.run("document.querySelectorAll('#items th button')[3].click()")
    times = browser.run(
        "[...document.querySelectorAll('#items tbody tr')].map((r) => r.cells[3].textContent)"
    )
    assert times == ["1.0 s", "2.0 s", "3.0 s", "4.0 s"]
    assert json.dumps(browser.complaints) == "[]"

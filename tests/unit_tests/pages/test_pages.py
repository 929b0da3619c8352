"""Pages as text: what is in them, how large they are, that no name or log gets out of its place."""

from __future__ import annotations

import html
import json
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from made_run import METRICS, MadeRun, changed, curve

from pytest_megatron.base.files import JsonValue
from pytest_megatron.cli import group
from pytest_megatron.errors import MegatronError
from pytest_megatron.workloads.golden.model import MetricMap

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'|`&\u2028\u202e\x1b[31m\nx"


def whole(num_steps: int, names: Sequence[str] = METRICS) -> MetricMap:
    return {name: curve(num_steps, seed=n) for n, name in enumerate(names)}


def off(metrics: MetricMap) -> MetricMap:
    return {**metrics, "lm loss": changed(metrics["lm loss"], {6: 11.0})}


def report(*arguments: str | Path) -> Result:
    return CliRunner().invoke(group, ["runs", "report", *map(str, arguments)])


@pytest.fixture
def run(tmp_path: Path) -> MadeRun:
    return MadeRun(root=tmp_path / "run")


def test_a_run_gets_an_index_and_a_page_for_each_workload(run: MadeRun) -> None:
    good = run.item("recipes/a.yaml::good[dev-cpu]", [whole(10)], golden=whole(10))
    told = "lm loss is off at step 6\n    lm loss, step 6: observed 11"
    bad = run.item("recipes/a.yaml::bad[dev-cpu]", [off(whole(10))], golden=whole(10), problem=told)
    result = report(run.write())
    assert (result.exit_code, result.output) == (0, f"{run.root / 'index.html'}\n")
    index = (run.root / "index.html").read_text()
    assert index.index("::bad[") < index.index("::good[")
    assert f'href="{bad.parent.name}/curves.html"' in index
    assert "<small>lm loss is off at step 6</small>" in index
    assert good.is_file()
    assert "first_step" not in (page := bad.read_text())
    assert 'href="../index.html"' in page
    assert "'recipes/a.yaml::bad[dev-cpu]'" in html.unescape(page)


def test_attempts_that_failed_are_on_the_page_with_their_logs(run: MadeRun) -> None:
    node_id = "recipes/a.yaml::flaky[dev-cpu]"
    page = run.item(node_id, [whole(10)], golden=whole(10), failed={1: whole(4)})
    log = page.parent / "repeat_1/attempt_1/phase_1/logs/1/stderr.log"
    log.parent.mkdir(parents=True)
    log.write_text("RuntimeError")
    report(run.write())
    content = page.read_text()
    assert 'href="repeat_1/attempt_1/phase_1/logs/1/stderr.log"' in content
    assert "rank 1 of 2 raised RuntimeError" in content
    (loss,) = [svg for svg in re.findall("<svg.*?</svg>", content, re.DOTALL) if "lm loss" in svg]
    assert re.findall(r'y="64" [^>]*>(.*?)<', loss) == ["golden", "attempt 1", "attempt 2"]


def test_failures_of_distributed_tests_are_on_the_index_with_their_ranks(run: MadeRun) -> None:
    run.test("tests/test_a.py::test_good", "passed")
    ranks = {"0": "stopped", "1": "SIGSEGV", "2": "stopped"}
    run.test("tests/test_a.py::test_bad", "failed", ranks, ["traceback", "Captured <stdout>"])
    report(run.write())
    index = (run.root / "index.html").read_text()
    assert "2 distributed tests: 1 failed, 1 passed" in index
    assert "ranks 0, 2: stopped<br>rank 1: SIGSEGV" in index
    told = "<b>Captured &lt;stdout&gt;</b><pre>Captured &lt;stdout&gt;</pre>"
    assert "<b>traceback</b><pre>traceback</pre>" in index
    assert index.index(told) < index.index("1 passed or skipped") < index.index("test_good")
    assert re.findall(r'href="(ranks.*?)">(.*?)<', index) == [
        ("ranks/attempt_1/1/stderr.log", "rank 1 stderr")
    ]


def test_eight_charts_of_a_hundred_steps_are_below_150_kb(run: MadeRun) -> None:
    names = [f"metric {n}" for n in range(8)]
    golden = whole(100, names)
    observed = {name: changed(s, {50: 1.0, 51: 2.0}) for name, s in golden.items()}
    page = run.item("recipes/a.yaml::a[dev-cpu]", [observed], golden=golden)
    report(run.write())
    assert page.stat().st_size < 150_000


def test_an_index_of_600_workloads_is_below_500_kb(run: MadeRun) -> None:
    for number in range(600):
        name = f"recipes/h100/gpt.yaml::gpt3_tp2_pp2_case_with_a_long_name_{number}[dev-dgx_h100]"
        run.item(name, [])
    run.item("recipes/a.yaml::drawn[dev-cpu]", [whole(100)], golden=whole(100))
    report(run.write())
    index = (run.root / "index.html").read_text()
    assert len(index) + 600 * 80 < 500_000  # longer summaries in each


def test_nothing_that_a_run_says_becomes_part_of_a_page(run: MadeRun) -> None:
    evil_metric = {EVIL: curve(5), "lm loss": curve(5)}
    page = run.item(f"recipes/a.yaml::{EVIL}", [evil_metric], golden=evil_metric, problem=EVIL)
    run.test(f"tests/{EVIL}", "failed", {"0": EVIL}, [EVIL])
    run.write()
    kept = json.loads((run.root / "run.json").read_text())
    kept |= {"image": EVIL, "started": EVIL, "arguments": [EVIL, "\ud800"]}
    (run.root / "run.json").write_text(json.dumps(kept))
    assert report(run.root).exit_code == 0
    for path in (page, run.root / "index.html"):
        content = path.read_text()
        assert content.count("<script") == content.count("</script>") <= 2
        assert "<img" not in content
        assert "alert(1)</script" not in content
        assert "default-src 'none'" in content
        assert not re.search("[\x1b\u202e]", content)


def test_paths_in_a_run_lead_nowhere(run: MadeRun, tmp_path: Path) -> None:
    (tmp_path / "secret.json").write_text('{"lm loss": {"values": {"1": 4.25}}}')
    run.items["../../x::y[z]"] = {
        "verdict": "failed",
        "directory": str(tmp_path),
        "attempts": [{"repeat": 1, "attempt": 1, "directory": str(tmp_path)}],
    }
    run.items["javascript:alert(1)"] = {"verdict": "passed"}
    assert report(run.write()).exit_code == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run", "secret.json"]
    index = (run.root / "index.html").read_text()
    assert not re.search(r'href="(/|\.\./|\w+:)', index)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (
            {"repeat": "../..", "attempt": 1},
            "attempts[0].repeat: found '../..', expected an integer",
        ),
        ({"repeat": 1, "attempt": 10**9}, "attempt: found 1000000000, expected an integer >= 1"),
        ({"repeat": 1, "attempt": 10**400}, "a number has more than 300 digits"),
    ],
)
def test_an_attempt_that_no_run_has_is_one_error(
    run: MadeRun, keys: dict[str, JsonValue], expected: str
) -> None:
    run.items["a.yaml::y[z]"] = {"verdict": "failed", "attempts": [keys]}
    error = report(run.write()).exception
    assert isinstance(error, MegatronError)
    assert expected in str(error)
    assert not (run.root / "index.html").exists()


def test_several_runs_and_an_artifact_make_one_index(run: MadeRun, tmp_path: Path) -> None:
    run.item("recipes/a.yaml::a[dev-cpu]", [off(whole(10))], golden=whole(10))
    run.write()
    with zipfile.ZipFile(tmp_path / "logs-job.zip", "w") as packed:
        for path in sorted(run.root.rglob("*")):
            packed.write(path, path.relative_to(tmp_path))
    output = tmp_path / "all"
    result = report(run.root, tmp_path / "logs-job.zip", "--output", output)
    assert (result.exit_code, result.output) == (0, f"{output / 'index.html'}\n")
    index = (output / "index.html").read_text()
    pages = re.findall(r'href="([^"]+curves\.html)"', index)
    assert len(pages) == 2
    assert all((output / page).is_file() for page in pages)
    assert "2 runs" in index
    direct, unpacked = ((output / page).read_text() for page in pages)
    assert 'href="../../../run/' in direct  # the files of a directory can be reached
    assert "comparison.json</a>" not in unpacked
    assert not (run.root / "index.html").exists()


def test_damaged_files_of_a_workload_cost_their_curves_only(run: MadeRun) -> None:
    page = run.item("recipes/a.yaml::a[dev-cpu]", [whole(10), whole(10)], golden=whole(10))
    phase = page.parent / "repeat_1/attempt_1/phase_1"
    (phase / "metrics.json").write_text("{")
    (page.parent / "golden.json").write_text("")
    (page.parent / "comparison.json").write_text('{"repeats": [{"comparisons": [7]}, 3]}')
    assert report(run.write()).exit_code == 0
    content = page.read_text()
    assert "the golden is not shown: empty file" in content
    assert "attempt_1/phase_1/metrics.json is not shown: not JSON" in content


def test_a_workload_that_measured_nothing_has_a_page(run: MadeRun) -> None:
    page = run.item("recipes/a.yaml::a[dev-cpu]", [], problem="not enough GPUs; nothing was run")
    report(run.write())
    assert "No curve was measured." in page.read_text()
    assert "nothing was run" in page.read_text()


def test_a_workload_that_was_not_started_gets_a_line_and_no_directory(run: MadeRun) -> None:
    run.items["recipes/a.yaml::a[dev-cpu]"] = {"verdict": "broken", "problem": "no golden"}
    report(run.write())
    assert sorted(p.name for p in run.root.iterdir()) == ["index.html", "run.json"]
    assert "no golden" in (run.root / "index.html").read_text()


def test_a_failure_in_quarantine_says_so(run: MadeRun) -> None:
    told = "lm loss is off"
    page = run.item("recipes/a.yaml::a[dev-cpu]", [off(whole(10))], golden=whole(10), problem=told)
    record = run.items["recipes/a.yaml::a[dev-cpu]"]
    assert isinstance(record, dict)
    record["quarantine"] = {"reason": "see #7", "holds": True}
    report(run.write())
    assert "in quarantine, see #7: lm loss is off" in (run.root / "index.html").read_text()
    assert "<b>in quarantine</b> see #7" in page.read_text()


def test_a_damaged_artifact_is_named_and_the_others_are_shown(run: MadeRun, tmp_path: Path) -> None:
    run.item("recipes/a.yaml::a[dev-cpu]", [whole(10)], golden=whole(10))
    (tmp_path / "logs-torn.zip").write_bytes(b"PK torn")
    result = report(run.write(), tmp_path / "logs-torn.zip", "--output", tmp_path / "out")
    assert (result.exit_code, "logs-torn.zip: is no zip" in result.output) == (2, True)
    assert "1 passed" in (tmp_path / "out/index.html").read_text()

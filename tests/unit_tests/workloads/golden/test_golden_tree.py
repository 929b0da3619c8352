"""`golden convert`, `lint` and `show` over a small tree, as they are called."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from golden_command import run

from pytest_megatron.workloads.golden.store import read_golden

BESIDE = Path("tests/functional_tests/test_cases/gpt/tp1")
OURS = Path("golden_values/gpt/tp1")
OLD = BESIDE / "golden_values_dev_oldcluster.json"
NEW = OURS / "golden_values_dev_dgx_h100.json"
BASELINE = {"dgx_h100": {"batch_1": {"throughput_tok_per_sec": 12.5}}}


@pytest.fixture(autouse=True)
def _project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    BESIDE.mkdir(parents=True)
    Path("recipes").mkdir()
    Path("pyproject.toml").write_text(
        "[tool.pytest-megatron.golden-platforms]\noldcluster = 'dgx_h100'\n"
    )
    Path("recipes/r.yaml").write_text(
        "type: basic\nformat_version: 1\n"
        "spec: {model: gpt, gpus: 1, platforms: dgx_h100, training_script_path: train.py}\n"
        "products:\n  - test_case: [tp1]\n    products: [{environment: [dev], scope: [mr]}]\n"
    )
    (BESIDE / "model_config.yaml").write_text("TEST_TYPE: regular\nMODEL_ARGS: {}\n")
    values = {str(step): 2 + 1 / step for step in range(1, 31)}
    block = {"start_step": 1, "end_step": 30, "step_interval": 1, "values": values}
    OLD.write_text(json.dumps({"lm loss": block}, indent=4))


def test_convert_only_says_what_it_would_do() -> None:
    old = OLD.read_text()
    found = run("convert", BESIDE)
    assert found.code == 0
    assert found.out.splitlines() == [
        f"{OLD}: 39 -> 3 lines, 1129 -> 720 bytes",
        "1 of 1 golden would change: 39 -> 3 lines, 1129 -> 720 bytes",
    ]
    assert run("convert", BESIDE, "--check").code == 1
    assert OLD.read_text() == old
    assert run("convert", BESIDE, "--write").code == 0
    assert run("convert", BESIDE, "--check").code == 0


def test_convert_to_the_projects_own_form_loses_nothing() -> None:
    document = json.loads(OLD.read_text()) | {"_provenance": {"commit": "abc"}}
    OLD.write_text(json.dumps(document))
    Path("pyproject.toml").write_text("[tool.pytest-megatron]\ngolden-form = 'megatron'\n")
    assert run("convert", BESIDE, "--write").code == 0
    assert json.loads(OLD.read_text())["_provenance"]["commit"] == "abc"
    assert run("convert", BESIDE, "--check").code == 0
    assert run("convert", BESIDE, "--to", "megatron", "--write").code == 1


def test_convert_moves_a_golden_to_our_place_under_its_platforms_own_name() -> None:
    metrics = read_golden(OLD).metrics
    assert run("convert", BESIDE, "--layout", "ours", "--write").code == 0
    assert not OLD.exists()
    assert read_golden(NEW).metrics == metrics
    assert run("convert", NEW, "--layout", "megatron", "--output", "out").code == 0
    assert NEW.exists()
    assert (Path("out") / BESIDE / NEW.name).read_text() == NEW.read_text()


def test_convert_overwrites_no_other_golden() -> None:
    OURS.mkdir(parents=True)
    NEW.write_text("{}")
    (BESIDE / "golden_values_dev_dgx_h100_2nd.json").write_text(OLD.read_text())
    found = run("convert", BESIDE, "--layout", "ours", "--write")
    assert found.code == 2
    assert found.err == (
        f"pytest-megatron: {BESIDE}/golden_values_dev_dgx_h100_2nd.json: the dump of a second run, "
        "no golden; not moved\n"
        f"pytest-megatron: {OLD}: would become {NEW}, as {NEW}; not moved\n"
    )
    assert (NEW.read_text(), OLD.exists()) == ("{}", True)


def test_convert_loses_nothing_unasked() -> None:
    old = OLD.read_text()
    code, out, err = run("convert", OLD, "--five-decimals", "--write")
    assert (code, OLD.read_text()) == (1, old)
    assert "  loses lm loss: digits of 21 values, rounded by 4.5e-06 at most\n" in out
    assert err == "nothing written, since something would be lost: give --allow-loss\n"
    assert run("convert", OLD, "--five-decimals", "--write", "--allow-loss").code == 0
    assert read_golden(OLD).metrics["lm loss"].values[2] == 2.33333


def test_convert_writes_all_or_nothing() -> None:
    old = OLD.read_text()
    Path("golden_values").write_text("a file where the directory belongs")
    found = run("convert", BESIDE, "--layout", "ours", "--write")
    assert found.code == 2
    assert "cannot be written: " in found.err
    assert OLD.read_text() == old


def test_convert_asks_for_one_way_to_write() -> None:
    assert run("convert", OLD, "--check", "--write").code == 2


def test_lint_prints_findings_and_what_it_looked_at() -> None:
    (BESIDE / "golden_values_dev_dgx_h100_2nd.json").write_text("{}")
    found = run("lint")
    assert found.code == 0
    assert found.out.splitlines() == [
        (
            f"{BESIDE}/golden_values_dev_dgx_h100_2nd.json: warning: is the dump of a second run, "
            "which nothing reads; remove it [golden-second-run]"
        ),
        "0 errors, 1 warning",
        "2 goldens, 0.0 MB; 1 of them read by a row",
    ]
    OLD.write_text("{}")
    found = run("lint", OLD, "--format", "github")
    assert found.code == 1
    assert found.out == (
        f"::error file={OLD},title=golden-empty::holds no metric ({{}}), expected an object of "
        "metrics; record it again\n"
    )
    assert run("lint", "nothing").code == 2


def test_show_knows_every_kind_and_goes_on_after_a_file_that_it_cannot_read() -> None:
    inference = BESIDE / "golden_values_dev_dgx_a100.json"
    inference.write_text(
        '{"0": {"generated_text": "a", "logprobs": [-1.5, -2]}, "throughput": [3]}'
    )
    baseline = BESIDE / "golden_values_lts_dgx_a100.json"
    baseline.write_text(json.dumps(BASELINE))
    (BESIDE / "golden_values_lts.json").write_text("{}")
    code, out, err = run("show", BESIDE)
    assert code == 2
    assert "golden_values_lts.json: holds no metric ({})" in err
    pages = [page.splitlines() for page in out.split("\n\n")]
    assert {
        head.partition(": ")[2]: [row.split("  ")[0] for row in rows] for head, _, *rows in pages
    } == {
        "output of an inference program, 1 request": [
            "logprobs of 0",
            "generated_text of 0",
            "throughput",
        ],
        "series of a training": ["lm loss"],
        "performance baseline, which no run is compared with": [
            "dgx_h100 / batch_1 / throughput_tok_per_sec"
        ],
    }
    (BESIDE / "golden_values_lts.json").unlink()
    assert run("show", "recipes").code == 2

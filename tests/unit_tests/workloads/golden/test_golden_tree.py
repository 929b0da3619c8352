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


def test_convert_only_says_what_it_would_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = OLD.read_text()
    assert run(monkeypatch, "convert", BESIDE) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{OLD}: 39 -> 3 lines, 1129 -> 720 bytes",
        "1 of 1 golden would change: 39 -> 3 lines, 1129 -> 720 bytes",
    ]
    assert run(monkeypatch, "convert", BESIDE, "--check") == 1
    assert OLD.read_text() == old
    assert run(monkeypatch, "convert", BESIDE, "--write") == 0
    assert run(monkeypatch, "convert", BESIDE, "--check") == 0


def test_convert_to_the_projects_own_form_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    document = json.loads(OLD.read_text()) | {"_provenance": {"commit": "abc"}}
    OLD.write_text(json.dumps(document))
    Path("pyproject.toml").write_text("[tool.pytest-megatron]\ngolden-form = 'megatron'\n")
    assert run(monkeypatch, "convert", BESIDE, "--write") == 0
    assert json.loads(OLD.read_text())["_provenance"]["commit"] == "abc"
    assert run(monkeypatch, "convert", BESIDE, "--check") == 0
    assert run(monkeypatch, "convert", BESIDE, "--to", "megatron", "--write") == 1


def test_convert_moves_a_golden_to_our_place_under_its_platforms_own_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    metrics = read_golden(OLD).metrics
    assert run(monkeypatch, "convert", BESIDE, "--layout", "ours", "--write") == 0
    assert not OLD.exists()
    assert read_golden(NEW).metrics == metrics
    assert run(monkeypatch, "convert", NEW, "--layout", "megatron", "--output", "out") == 0
    assert NEW.exists()
    assert (Path("out") / BESIDE / NEW.name).read_text() == NEW.read_text()


def test_convert_overwrites_no_other_golden(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    OURS.mkdir(parents=True)
    NEW.write_text("{}")
    (BESIDE / "golden_values_dev_dgx_h100_2nd.json").write_text(OLD.read_text())
    assert run(monkeypatch, "convert", BESIDE, "--layout", "ours", "--write") == 2
    assert capsys.readouterr().err == (
        f"pytest-megatron: {BESIDE}/golden_values_dev_dgx_h100_2nd.json: the dump of a second run, "
        "no golden; not moved\n"
        f"pytest-megatron: {OLD}: would become {NEW}, as {NEW}; not moved\n"
    )
    assert (NEW.read_text(), OLD.exists()) == ("{}", True)


def test_convert_loses_nothing_unasked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = OLD.read_text()
    assert run(monkeypatch, "convert", OLD, "--five-decimals", "--write") == 1
    assert OLD.read_text() == old
    out, err = capsys.readouterr()
    assert "  loses lm loss: digits of 21 values, rounded by 4.5e-06 at most\n" in out
    assert err == "nothing written, since something would be lost: give --allow-loss\n"
    assert run(monkeypatch, "convert", OLD, "--five-decimals", "--write", "--allow-loss") == 0
    assert read_golden(OLD).metrics["lm loss"].values[2] == 2.33333


def test_convert_writes_all_or_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = OLD.read_text()
    Path("golden_values").write_text("a file where the directory belongs")
    assert run(monkeypatch, "convert", BESIDE, "--layout", "ours", "--write") == 2
    assert "cannot be written: " in capsys.readouterr().err
    assert OLD.read_text() == old


def test_convert_asks_for_one_way_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, "convert", OLD, "--check", "--write") == 2


def test_lint_prints_findings_and_what_it_looked_at(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (BESIDE / "golden_values_dev_dgx_h100_2nd.json").write_text("{}")
    assert run(monkeypatch, "lint") == 0
    assert capsys.readouterr().out.splitlines() == [
        (
            f"{BESIDE}/golden_values_dev_dgx_h100_2nd.json: warning: is the dump of a second run, "
            "which nothing reads; remove it [golden-second-run]"
        ),
        "0 errors, 1 warning",
        "2 goldens, 0.0 MB; 1 of them read by a row",
    ]
    OLD.write_text("{}")
    assert run(monkeypatch, "lint", OLD, "--format", "github") == 1
    assert capsys.readouterr().out == (
        f"::error file={OLD},title=golden-empty::holds no metric ({{}}), expected an object of "
        "metrics; record it again\n"
    )
    assert run(monkeypatch, "lint", "nothing") == 2


def test_show_knows_every_kind_and_goes_on_after_a_file_that_it_cannot_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    inference = BESIDE / "golden_values_dev_dgx_a100.json"
    inference.write_text(
        '{"0": {"generated_text": "a", "logprobs": [-1.5, -2]}, "throughput": [3]}'
    )
    baseline = BESIDE / "golden_values_lts_dgx_a100.json"
    baseline.write_text(json.dumps(BASELINE))
    (BESIDE / "golden_values_lts.json").write_text("{}")
    assert run(monkeypatch, "show", BESIDE) == 2
    out, err = capsys.readouterr()
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
    assert run(monkeypatch, "show", "recipes") == 2

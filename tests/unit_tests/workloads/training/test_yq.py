"""The stand-in for yq does what drivers ask of yq 4, and refuses what it does not know."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from pytest_megatron.workloads.training.tools.yq import main

CASE = """\
TEST_TYPE: ckpt-resume # comment
ENV_VARS: {A: 1, B: ^NVLS}
BASE: &base {--x: 1}
MODEL_ARGS:
  <<: *base
  --train-iters: 100
  --lr: 3.0e-5
  --bf16: true
  --empty: ""
  --flag: no
PRODUCTS: [{name: [a, b]}, {name: [c]}]
"""
ENTRIES = (
    '... comments="" | .[env(KEY)] | to_entries | .[] | with(select(.value == true); '
    '.value = "true") | .key + ": " + (select(.value != "") | .value | tostring)'
)


@pytest.fixture
def case(tmp_path: Path) -> Path:
    (tmp_path / "c.yaml").write_text(CASE)
    return tmp_path / "c.yaml"


@pytest.mark.parametrize(
    ("expression", "printed"),
    [
        (".TEST_TYPE", "ckpt-resume\n"),
        ('.MODE // "pretraining"', "pretraining\n"),
        (".ENV_VARS.SKIP_PYTEST", "null\n"),
        ('.MODEL_ARGS."--lr"', "3.0e-5\n"),
        (
            '... comments="" | .ENV_VARS | to_entries | .[] | [.key + "=" + .value] | join(" ")',
            "A=1\nB=^NVLS\n",
        ),
        (ENTRIES, "--x: 1\n--train-iters: 100\n--lr: 3.0e-5\n--bf16: true\n--flag: no\n"),
        ('has("MODEL_ARGS_2")', "false\n"),
        ('explode(.) | keys | .[] | select(test("^MODEL_ARGS(_[0-9]+)?$"))', "MODEL_ARGS\n"),
        (".PRODUCTS[].name[]", "a\nb\nc\n"),
        (".PRODUCTS[1].name | length", "1\n"),
    ],
)
def test_what_drivers_ask_is_answered(
    case: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    expression: str,
    printed: str,
) -> None:
    monkeypatch.setenv("KEY", "MODEL_ARGS")
    assert main([expression, str(case)]) == 0
    assert capsys.readouterr().out == printed


def test_a_file_is_changed_in_place_and_keeps_its_numbers(
    case: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change = (
        '.ENV_VARS."SKIP_PYTEST" = 1 | .MODEL_ARGS."--exit-interval" = .MODEL_ARGS."--train-iters"'
    )
    assert main(["-i", change, str(case)]) == 0
    assert main([".MODEL_ARGS", str(case)]) == 0
    assert "SKIP_PYTEST: 1\n" in case.read_text()
    text = capsys.readouterr().out
    assert "--lr: 3.0e-5\n" in text
    assert text.endswith("--exit-interval: 100\n")


def test_json_is_printed_as_yaml(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO('{a: [["x", "y"]], b: 1.0}'))
    assert main(["-P"]) == 0
    assert capsys.readouterr().out == "a:\n- - x\n  - y\nb: 1.0\n"


@pytest.mark.parametrize("expression", [".A | sort_by(.x)", ".A |", "-o=json", ".A $"])
def test_what_is_not_known_is_refused(
    case: Path, capsys: pytest.CaptureFixture[str], expression: str
) -> None:
    assert main([expression, str(case)]) == 1
    assert "install yq 4" in capsys.readouterr().err or expression == ".A $"

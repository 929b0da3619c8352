"""`pytest-megatron trace`: what it compares, its forms, exit codes and errors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from traced_runs import CHANGED, ITEM, write_run, write_trace

from pytest_megatron.errors import MegatronError
from pytest_megatron.trace.command import command

OTHER = "recipes/gpt.yaml::pp2[dev-cpu]"
FOUND = f"forward of {CHANGED} output.0, step 1, ranks 0-1"


def run(*arguments: str | Path) -> tuple[int, str]:
    try:
        done = CliRunner().invoke(command, list(map(str, arguments)), catch_exceptions=False)
    except MegatronError as error:
        return 2, str(error)
    return done.exit_code, done.output


def test_equal_runs_are_equal_whatever_else_differs(tmp_path: Path) -> None:
    before = write_run(tmp_path / "before", "1f0c2a7d9b64", ITEM, env={"DATA_PATH": "/a"})
    after = write_run(tmp_path / "after", "8be51f30c2ad", ITEM, env={"DATA_PATH": "/b"})
    code, text = run("diff", before, after)
    assert code == 0
    assert text.splitlines() == [
        "commit: 1f0c2a7d9b64 and 8be51f30c2ad",
        "variable DATA_PATH: /a and /b",
        f"equal: {ITEM}, phase 1: 96 tensors of 2 steps",
    ]


def test_the_first_difference_of_each_item_is_named(tmp_path: Path) -> None:
    before = write_run(tmp_path / "before", "1f0c2a7d9b64", ITEM, OTHER)
    after = write_run(tmp_path / "after", "1f0c2a7d9b64", ITEM, OTHER, is_changed=True)
    shutil.rmtree(next(after.glob("*pp2*")))
    shutil.copytree(next(before.glob("*pp2*")), after / next(before.glob("*pp2*")).name)
    code, text = run("diff", before, after)
    lines = text.splitlines()
    assert (code, lines[0]) == (1, f"different: {ITEM}, phase 1: {FOUND}")
    assert lines[-2:] == [
        f"equal: {OTHER}, phase 1: 96 tensors of 2 steps",
        "1 of 2 traces are equal",
    ]


def test_json_has_all_of_it(tmp_path: Path) -> None:
    before = write_run(tmp_path / "before", "1f0c2a7d9b64", ITEM)
    after = write_run(tmp_path / "after", "8be51f30c2ad", ITEM, is_changed=True)
    code, text = run("diff", before, after, "--format", "json")
    found = json.loads(text)
    (trace,) = found["traces"]
    assert (code, found["verdict"]) == (1, "different")
    assert found["differences"] == ["commit: 1f0c2a7d9b64 and 8be51f30c2ad"]
    assert (trace["item"], trace["phase"]) == (ITEM, 1)
    assert trace["comparison"]["divergences"][0]["module"] == CHANGED


def test_an_artifact_is_compared_with_a_run(tmp_path: Path) -> None:
    before = write_run(tmp_path / "before", "1f0c2a7d9b64", ITEM)
    packed = shutil.make_archive(str(tmp_path / "artifact"), "zip", before)
    after = write_run(tmp_path / "after", "1f0c2a7d9b64", ITEM, is_changed=True)
    code, text = run("diff", packed, after)
    assert (code, text.splitlines()[0]) == (1, f"different: {ITEM}, phase 1: {FOUND}")


def test_bare_directories_are_compared(tmp_path: Path) -> None:
    write_trace(tmp_path / "a", is_changed=False)
    write_trace(tmp_path / "b", is_changed=True)
    code, text = run("diff", tmp_path / "a", tmp_path / "b")
    assert (code, text.splitlines()[0]) == (1, f"different: {tmp_path / 'a'}: {FOUND}")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["none", "run"], "none: is not there, expected a run directory or an artifact of one"),
        (["untraced", "run"], "untraced: has no trace of tensors; run it with --tensor-trace hash"),
        (["run", "other"], "trace diff: no trace of one item in both: the first has "),
    ],
)
def test_what_cannot_be_compared_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    third = "recipes/gpt.yaml::cp2[dev-cpu]"
    write_run(Path("run"), "1f0c2a7d9b64", ITEM)
    write_run(Path("other"), "1f0c2a7d9b64", OTHER, third)
    write_run(Path("untraced"), "1f0c2a7d9b64", ITEM)
    shutil.rmtree(next(Path("untraced").glob("*/repeat_1")))
    code, text = run("diff", *words)
    assert (code, text[: len(expected)]) == (2, expected)

"""Tests that run again after an edit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_megatron.gangs.command import choose


@pytest.mark.parametrize(
    ("changed", "paths", "expected"),
    [
        (["tests/test_a.py"], ["tests"], ["tests/test_a.py"]),
        (["tests/test_a.py", "tests/b_test.py"], [], ["tests/test_a.py", "tests/b_test.py"]),
        (["tests/test_a.py"], ["tests/test_a.py::test_1"], ["tests/test_a.py::test_1"]),
        (["tests/helper.py"], ["tests"], ["tests"]),
        (["tests/test_a.py", "tests/helper.py"], ["tests"], ["tests"]),
        (["other/test_b.py"], ["tests"], ["tests"]),
        (["tests/test_gone.py"], ["tests"], ["tests"]),
        (["tests/helper.py"], ["tests/helper.py"], ["tests/helper.py"]),
    ],
)
def test_a_test_file_runs_alone_and_another_file_runs_all(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changed: list[str],
    paths: list[str],
    expected: list[str],
) -> None:
    for name in ("tests/test_a.py", "tests/b_test.py", "tests/helper.py", "other/test_b.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    assert choose([tmp_path / name for name in changed], paths) == expected


def lines(process: subprocess.Popen[str]) -> Iterator[str]:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("watch:") or " in " in line:
            yield line.partition(" in ")[0].strip()


def test_tests_run_after_each_edit_until_ctrl_c(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]")
    (tmp_path / "helper.py").write_text("VALUE = 1")
    (tmp_path / "test_a.py").write_text("import helper\ndef test(): assert helper.VALUE == 1")
    (tmp_path / "test_b.py").write_text("def test(): pass")
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "COV_"))}
    with subprocess.Popen(
        [
            Path(sys.executable).with_name("pytest-megatron"),
            "gangs",
            "watch",
            ".",
            "-q",
            "-p",
            "megatron",
        ],
        cwd=tmp_path,
        env=env | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        shown = lines(process)
        waiting = "watch: waiting for a change; Ctrl-C ends"
        assert [next(shown), next(shown)] == ["2 passed", waiting]
        (tmp_path / "test_b.py").write_text("def test(): assert 0\ndef test_2(): pass")
        changed = "watch: changed: test_b.py"
        assert [next(shown) for _ in range(3)] == [changed, "1 failed, 1 passed", waiting]
        (tmp_path / "helper.py").write_text("VALUE = 12")
        changed = "watch: changed: helper.py"
        assert [next(shown) for _ in range(3)] == [changed, "2 failed, 1 passed", waiting]
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 1

"""How `record` starts a command by hand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pytest_megatron.errors import LaunchError
from pytest_megatron.workloads.commands import by_hand
from pytest_megatron.workloads.commands.by_hand import ByHand, in_this_environment


@pytest.mark.parametrize(
    ("name", "head", "told"),
    [
        ("torchrun", "{python}", "so do the ranks of the row"),
        ("torchrun", "/usr/bin/env bash", ""),  # of a version manager, which may start any
        ("python3", "{python}", "the row names it in full"),
        ("accelerate", "{python}", ""),  # which the row starts as it is
        ("torchrun", "/of/an/environment/that/was/moved/bin/python", ""),
    ],
)
def test_a_program_of_another_environment_is_told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    head: str,
    told: str,
) -> None:
    if " " in str(tmp_path):
        pytest.skip("no path with a blank can be an interpreter")
    python, program = tmp_path / "python", tmp_path / "bin" / name
    program.parent.mkdir()
    python.write_text("#!/bin/sh\necho /another\n")
    program.write_text(f"#!{head.format(python=python)}\n")
    for file in (python, program):
        file.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    words = (name, "train.py", "--lr", "1")
    is_named = "in full" in told
    assert in_this_environment(words) == ((str(program), *words[1:]) if is_named else words)
    out = capsys.readouterr().out
    assert (
        (told in out and f"{program}, and pytest runs in {sys.prefix}" in out) if told else not out
    )


def test_a_command_that_prints_no_more_is_told_while_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(by_hand, "_SILENT_S", 0.5)
    program = "import time; print('trained'); time.sleep(1000)"
    command = ByHand(
        words=(sys.executable, "-c", program),
        root=tmp_path,
        directory=tmp_path / "logs",
        limit_s=5,
        env={},
        is_joint=False,
        gpus=(),
        num_gpus=0,
    )
    with pytest.raises(LaunchError, match="did not end within 5 s"):
        command.run("first")
    printed = capsys.readouterr().out
    assert printed.index("    trained\n") < printed.index(
        "nothing printed for 0.5 s; its limit is in"
    )
    assert "nothing printed for 1 s; its limit is in" in printed

"""How `record` starts a command by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_megatron.workloads.commands.by_hand import in_this_environment


@pytest.mark.parametrize(
    ("name", "is_named"), [("python3", True), ("torchrun", False), ("accelerate", False)]
)
def test_a_python_of_another_environment_is_named_in_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, *, is_named: bool
) -> None:
    program = tmp_path / name
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    words = (name, "train.py", "--lr", "1")
    assert in_this_environment(words) == ((str(program), *words[1:]) if is_named else words)

"""Commands on files that are none: each ends at once, with one error and no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMANDS = {
    "gpt.yaml": ("expand", "gpt.yaml"),
    "history.jsonl": ("flaky", "--history", "history.jsonl"),
    "run.json": ("runs", "report", "."),
    "plan.json": ("ci", "summary", ".", "--expect", "plan.json"),
    "golden.json": ("golden", "check", "--golden", "golden.json", "--observed", "golden.json"),
}
DEEP = "[" * 200_000


def run(directory: Path, name: str) -> subprocess.CompletedProcess[str]:
    """Run the command that reads a file."""
    return subprocess.run(
        [Path(sys.executable).with_name("pytest-megatron"), *COMMANDS[name]],
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("kind", ["fifo", "sparse", "deep"])
def test_a_file_that_is_none_is_one_error(tmp_path: Path, name: str, kind: str) -> None:
    path = tmp_path / name
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "sparse":
        with path.open("wb") as file:
            file.truncate(2 << 30)
    else:
        path.write_text(DEEP)
    done = run(tmp_path, name)
    assert "Traceback" not in done.stderr
    is_skipped_line = name.endswith(".jsonl") and kind == "deep"  # the others of the file count
    assert done.returncode in ((0,) if is_skipped_line else (1, 2)), done.stdout
    assert name in done.stderr

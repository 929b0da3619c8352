"""Run directories that cannot be written: one clear error, and the session goes on to its end."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_project import Project


@pytest.mark.usefixtures("small_disk")
def test_a_disk_that_fills_up_is_told_in_clear_lines(tmp_path: Path) -> None:
    project = Project(root=tmp_path)
    project.add("floods", "flood@3:1")
    project.add("next")
    run = project.run("recipes", run_dir="disk/run")
    assert run.returncode == pytest.ExitCode.TESTS_FAILED
    assert run.outcomes == {"floods": "FAILED", "next": "ERROR"}
    assert "INTERNALERROR" not in run.text
    assert (
        "No space left on device; give another --run-dir, or make room; nothing was run"
    ) in run.stdout
    assert (
        "run.json is not complete: disk/run: No space left on device; make room, "
        "or give another --run-dir"
    ) in run.stdout.splitlines()


def test_tests_without_a_run_directory_end_before_the_first_one(tmp_path: Path) -> None:
    project = Project(root=tmp_path)
    (tmp_path / "test_rank.py").write_text("def test_rank(rank):\n    pass\n")
    run = project.run("test_rank.py", "--ranks", "2", run_dir="train.py/run")
    assert run.returncode == pytest.ExitCode.USAGE_ERROR
    (line,) = [line for line in run.text.splitlines() if "train.py/run: Not a directory" in line]
    assert line.startswith("ERROR: ")
    assert "Traceback" not in run.text
    assert " no tests ran " in run.stdout

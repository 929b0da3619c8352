"""`pytest-megatron demo` as a process, in surroundings that must not reach it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from literate import ROOT, Block, missing, steps_of

pytestmark = pytest.mark.nightly

SURROUNDINGS = {
    "GIT_AUTHOR_NAME": "A hook",
    "PYTEST_ADDOPTS": "--collect-only",
    "SLURM_JOB_ID": "7",
    "SLURM_NNODES": "4",
    "SLURM_STEP_NUM_NODES": "4",
    "COLUMNS": "80",
}
FILES = [
    ".gitignore",
    "pyproject.toml",
    "recipes/demo.yaml",
    "tests/functional_tests/test_cases/demo/line/model_config.yaml",
    "tests/test_hang.py",
    "tests/test_sums.py",
    "train.py",
]


def run_demo(
    where: Path, *arguments: str, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    code = "from pytest_megatron.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, "demo", *arguments],
        cwd=where,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def git(where: Path, *arguments: str) -> str:
    command = ["git", "-C", str(where), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_a_demo_shows_a_hang_and_a_workload_that_equals_the_golden_it_recorded(
    tmp_path: Path,
) -> None:
    outer = tmp_path / "outer repository"
    outer.mkdir()
    git(outer, "init", "--quiet")
    settings = tmp_path / "home" / ".gitconfig"
    settings.parent.mkdir()
    settings.write_text("[commit]\n\tgpgSign = true\n[core]\n\texcludesFile = /dev/stdin\n")
    env = {**SURROUNDINGS, "HOME": str(settings.parent), "GIT_DIR": str(outer / ".git")}

    done = run_demo(outer, "a demo", env=env)

    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    demo = outer / "a demo"
    assert "rank 0 did not end in 4 s" in done.stdout
    assert "1 failed, 3 passed" in done.stdout
    assert "bitwise equal" in done.stdout
    following = done.stdout.partition("Next, in a demo:\n")[2].splitlines()
    commands = [line for line in following if not line.startswith("  # after ")]
    assert (len(following), len(commands)) == (6, 3)
    assert all(line.startswith("  pytest -p megatron ") for line in commands)
    address = next(line for line in done.stdout.splitlines() if "file://" in line)
    assert address.endswith("/index.html")
    assert "/a%20demo/" in address
    assert git(demo, "status", "--short") == ""
    assert git(demo, "log", "--format=%an: %s").splitlines() == [
        "pytest-megatron demo: Record the golden",
        "pytest-megatron demo: Write the demo",
    ]
    golden = "golden_values/demo/line/golden_values_dev_cpu.json"
    assert git(demo, "ls-files").splitlines() == sorted([*FILES, golden])
    assert "user" not in (demo / ".git/config").read_text()
    assert git(outer, "rev-list", "--all") == ""
    printed = done.stdout.replace("a demo", "pytest-megatron-demo").replace("%20", "-")
    assert missing(shown_in("README.md"), printed) is None


def shown_in(page: str) -> tuple[str, ...]:
    """Return the output of the demo that a page shows."""
    steps = steps_of((ROOT / page).read_text(encoding="utf-8"))
    commands = (command for step in steps if isinstance(step, Block) for command in step.commands)
    (output,) = (each.output for each in commands if each.text == "pytest-megatron demo")
    return output


def test_a_demo_leaves_a_directory_with_content_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    done = run_demo(tmp_path, ".")
    message = (
        "pytest-megatron: .: is not empty, expected an empty directory or none; name another\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (2, "", message)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_demo_in_place_of_a_file_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "demo").write_text("")
    done = run_demo(tmp_path, "demo")
    message = "pytest-megatron: demo: File exists; name a directory that can be written\n"
    assert (done.returncode, done.stderr) == (2, message)


def test_a_demo_without_torch_writes_nothing(tmp_path: Path) -> None:
    place = tmp_path / "site"
    place.mkdir()
    (place / "sitecustomize.py").write_text("import sys\nsys.modules['torch'] = None\n")
    done = run_demo(tmp_path, "demo", env={"PYTHONPATH": str(place)})
    assert done.returncode == 2
    assert done.stderr.startswith(f"pytest-megatron: demo: {sys.executable} has no torch, ")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "demo").exists()


def test_a_demo_without_git_is_one_error(tmp_path: Path) -> None:
    done = run_demo(tmp_path, "demo", env={"PATH": str(tmp_path)})
    message = (
        "pytest-megatron: demo: git is missing, which goldens need to name their commit;"
        " install it\n"
    )
    assert (done.returncode, done.stderr) == (2, message)


def test_a_demo_that_ends_otherwise_than_expected_fails(tmp_path: Path) -> None:
    place = tmp_path / "site"
    place.mkdir()
    lines = (
        "import os, sys",
        "if '--golden' in sys.orig_argv:",
        " os.write(1, b'no luck')",
        " os._exit(3)",
    )
    broken = "\n".join(lines)
    (place / "sitecustomize.py").write_text(broken)
    done = run_demo(tmp_path, "demo", env={"PYTHONPATH": str(place)})
    message = "pytest-megatron: demo: no golden was recorded, pytest ended with exit code 3\n"
    assert (done.returncode, done.stderr) == (2, message)
    assert "no luck" in done.stdout

"""A small project whose CI can be simulated: buckets of tests on two ranks, and a workload."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

MARK = "is-waiting"

_PYPROJECT = """\
[project]
name = "tiny"
version = "0"

[tool.pytest.ini_options]
addopts = "-q"

[tool.pytest-megatron.ci.workflow]
setup = ["true"]
"""
_UNITS = """\
type: basic
format_version: 1
spec:
  model: unit-tests
  gpus: 2
  platforms: cpu
  time_limit: 60
products:
  - test_case: [tests/unit_tests/**/*.py]
    products:
      - {environment: [dev], scope: [unit-tests], tag: [latest]}
  - test_case: [tests/unit_tests/more/**/*.py]
    products:
      - {environment: [dev], scope: [unit-tests], tag: [latest]}
  - test_case: [tests/unit_tests/test_last.py]
    products:
      - {environment: [dev], scope: [unit-tests], tag: [latest]}
"""
_RECIPE = """\
type: basic
format_version: 1
spec:
  model: tiny
  gpus: 1
  platforms: cpu
  training_script_path: train.py
products:
  - test_case: [line]
    products:
      - {environment: [dev], scope: [mr-github-slim], n_repeat: [1]}
"""
_CASE = """\
TEST_TYPE: regular
METRICS: [lm loss]
MODEL_ARGS:
  --train-iters: 5
"""
_TRAIN = """\
import argparse, json, os

parser = argparse.ArgumentParser()
parser.add_argument("--train-iters", type=int)
parser.add_argument("--exit-interval", type=int)
last = parser.parse_known_args()[0].exit_interval or 5
with open(os.environ["PYTEST_MEGATRON_METRICS"], "w") as metrics:
    for step in range(1, last + 1):
        print(json.dumps({"step": step, "lm loss": LOSS / step}), file=metrics, flush=True)
"""
_GOLDEN = (
    '{"lm loss": {"start_step": 1, "end_step": 5, "step_interval": 1, "values": '
    '{"1": 1.0, "2": 0.5, "3": 0.33333, "4": 0.25, "5": 0.2}}}\n'
)
_SOUND = "def test_sound(rank: int) -> None:\n    assert rank in (0, 1)\n"
_BAD = "def test_bad(rank: int) -> None:\n    assert rank != 1\n"
_WAITS = f"""\
import os, pathlib, threading


def test_waits(rank: int) -> None:
    pathlib.Path("{MARK}").touch()
    threading.Event().wait()
"""


def make_project(
    root: Path,
    *,
    fails: bool = False,
    waits: bool = False,
    differs: bool = False,
    trains: bool = True,
) -> None:
    """Write and commit the project, with its workflow as `ci init` writes it.

    Args:
        root: Where; made here.
        fails: Whether a test fails on rank 1.
        waits: Whether a test of the bucket `more` waits for ever, once it has made its mark.
        differs: Whether the workload's loss is not the golden's.
        trains: Whether there is a workload at all.
    """
    files = {
        "pyproject.toml": _PYPROJECT,
        ".gitignore": f".pytest_megatron\nmegatron-job\n__pycache__\n{MARK}\n",
        "recipes/units.yaml": _UNITS,
        "tests/unit_tests/test_one.py": _SOUND + (_BAD if fails else ""),
        "tests/unit_tests/more/test_two.py": _WAITS if waits else _SOUND,
        "tests/unit_tests/test_last.py": _SOUND,
    }
    if trains:
        files |= {
            "recipes/tiny.yaml": _RECIPE,
            "train.py": _TRAIN.replace("LOSS", "2.0" if differs else "1.0"),
            "tests/functional_tests/test_cases/tiny/line/model_config.yaml": _CASE,
            "golden_values/tiny/line/golden_values_dev_cpu.json": _GOLDEN,
        }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    run("pytest-megatron", "ci", "init", cwd=root)
    run("pytest-megatron", "ci", "init", "--gitlab", cwd=root)
    git = ("git", "-c", "user.name=ci", "-c", "user.email=ci@example.com")
    run("git", "init", "--quiet", "--initial-branch", "main", cwd=root)
    run("git", "add", "--all", cwd=root)
    run(*git, "commit", "--quiet", "--message", "A tiny project", cwd=root)


def run(*command: str, cwd: Path) -> str:
    """Run a command with this environment's console scripts; return what it printed."""
    scripts = Path(sys.executable).parent
    env = os.environ | {"PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=cwd, env=env, check=True, capture_output=True, text=True)
    return done.stdout

"""`dev.py`: the Pythons that it runs on, and the workloads that it trains."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_megatron.workloads.recipe.load import load_recipe

DEV = Path(__file__).parents[2] / "dev.py"
_AS_OLD = """
import runpy, sys
major, minor = map(int, sys.argv[2:])
sys.version_info = (major, minor, 0, "final", 0)
sys.modules["tomllib"] = None  # a module since Python 3.11
sys.argv[:] = [sys.argv[1], "setup"]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("version", ["3.7", "3.10", "3.14"])
def test_another_python_is_named_in_one_line(version: str) -> None:
    argv = [sys.executable, "-c", _AS_OLD, str(DEV), *version.split(".")]
    ended = subprocess.run(argv, capture_output=True, text=True, check=False)
    line = f"dev.py: runs on Python 3.11 to 3.13, this is {version}; start it with one of those\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, line, "")


def test_an_old_python_can_read_it() -> None:
    ast.parse(DEV.read_text(encoding="utf-8"), feature_version=(3, 7))


def test_the_smoke_tier_is_a_workload_of_one_rank_and_one_of_two() -> None:
    workloads = [w for file in (DEV.parent / "recipes").iterdir() for w in load_recipe(file)]
    smoke = [w for w in workloads if w.tag == "smoke" and w.platform == "cpu"]
    assert [w.test_case for w in smoke] == ["tp1_pp1", "dp2_dist_opt_resume"]

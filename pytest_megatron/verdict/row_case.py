"""Finds and reads the test case that a row of a recipe is about."""

from __future__ import annotations

from pathlib import Path

from pytest_megatron.launch.case import WorkloadCase, read_case
from pytest_megatron.recipe.model import Workload
from pytest_megatron.recipe.places import case_path
from pytest_megatron.verdict.modes import metric_names_of
from pytest_megatron.verdict.script_result import is_judged_by_us


def read_case_of(root: Path, workload: Workload) -> WorkloadCase | None:
    """Return the test case of a row.

    None for a row that brings its own script and either has no case or one that only the script
    can judge.

    Raises:
        CaseError: The case cannot be read, or names no metric.
    """
    path = case_path(root, workload)
    if workload.script is not None and not path.is_file():
        return None
    case = read_case(path)
    if workload.script is not None and not is_judged_by_us(case):
        return None
    metric_names_of(case)  # a case that compares nothing is told before it costs anything
    return case

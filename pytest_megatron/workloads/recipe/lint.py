"""Errors in recipes, in the cases that they name, and in the goldens that these need.

Reads files and changes none.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

from pytest_megatron.base.findings import Finding, Severity, in_order
from pytest_megatron.base.yaml import YamlDocument, YamlError, read_document
from pytest_megatron.errors import RecipeError
from pytest_megatron.workloads.recipe.case import (
    CASES,
    GOLDENS,
    WorkloadCase,
    case_path,
    check_case,
    golden_paths,
    is_missing_program,
)
from pytest_megatron.workloads.recipe.expand import Profile
from pytest_megatron.workloads.recipe.load import find_recipes, read_recipe
from pytest_megatron.workloads.recipe.megatron_row import native_rows
from pytest_megatron.workloads.recipe.model import BUILT_IN_WORDS, Vocabulary, Workload

RowCheck: TypeAlias = Callable[[Workload, WorkloadCase], Iterable[Finding]]


def lint_recipes(
    paths: Sequence[Path],
    *,
    root: Path,
    vocabulary: Vocabulary = BUILT_IN_WORDS,
    check: RowCheck = lambda _row, _case: (),
) -> tuple[Finding, ...]:
    """Return all findings on the recipes among and below `paths`.

    Goldens that no row reaches are looked for only if `paths` holds a directory: a single file
    does not show the rows of other recipes.

    Args:
        paths: Recipes, and directories of recipes.
        root: The project's, which has the test cases and goldens.
        vocabulary: The words that the recipes may use.
        check: Further check of a row and its case, from a layer above this one.

    Raises:
        RecipeError: A path does not exist.
    """
    findings: list[Finding] = []
    workloads: list[Workload] = []
    for file in find_recipes(paths):
        loaded = read_recipe(file, Profile.STRICT, vocabulary)
        findings += loaded.findings
        try:
            workloads += native_rows(loaded.workloads, os.environ, root)
        except RecipeError as error:
            workloads += loaded.workloads
            path, _, line = error.where.rpartition(":")
            finding = Finding(file=Path(path), line=int(line), rule="row", message=error.problem)
            findings.append(finding)
    findings += dict.fromkeys(_check_rows(workloads, root, check))
    if any(path.is_dir() for path in paths):
        findings += _unreachable_goldens(workloads, root)
    return in_order(findings)


def _check_rows(workloads: Iterable[Workload], root: Path, check: RowCheck) -> Iterator[Finding]:
    """Yield the errors of programs, cases and goldens of the rows."""
    cases: dict[Path, WorkloadCase | None] = {}
    for workload in workloads:
        path, own = case_path(root, workload), workload.own_case
        if own is not None or (path not in cases and path.is_file()):
            cases[path], findings = _read_case(path, own)
            yield from findings
        if workload.script is not None:
            continue  # a script does what it wants
        case = cases.get(path)
        yield from _check_program(workload, path, root, case)
        if case is None:
            continue
        if case.needs_golden:
            yield from _check_golden(workload, root)
        yield from check(workload, case)


def _read_case(
    path: Path, document: YamlDocument | None
) -> tuple[WorkloadCase | None, tuple[Finding, ...]]:
    """Return a case, None if it cannot be read, and its findings."""
    try:
        return check_case(document or read_document(path))
    except YamlError as problem:
        finding = Finding(
            file=path, line=problem.line, rule="case-unreadable", message=problem.problem
        )
        return None, (finding,)


def _check_program(
    workload: Workload, path: Path, root: Path, case: WorkloadCase | None
) -> Iterator[Finding]:
    """Yield the missing files of a row without a script; a BEFORE_SCRIPT may make the program."""
    program = workload.training_script_path
    key = "training_script_path" if workload.own_case is None else "command"
    is_made = case is not None and case.before_script is not None
    if program is None:
        yield _row_finding(
            workload,
            "nothing-to-run",
            f"{workload.test_case!r} has neither 'script' nor 'training_script_path'; add one",
        )
    elif not is_made and is_missing_program(root, program):
        yield _row_finding(
            workload,
            "missing-program",
            f"{workload.test_case!r} trains with {program.split()[0]}, which is not there; write "
            f"it, or change {key}, which counts from the project's root",
            Severity.ERROR if workload.disabled_reason is None else Severity.WARNING,
        )
    if not path.is_file():
        yield _row_finding(
            workload, "missing-case", f"{workload.test_case!r} has no case, expected {path}"
        )


def _check_golden(workload: Workload, root: Path) -> Iterator[Finding]:
    """Yield the golden that a row compares with and that is not there."""
    if workload.script is not None and not workload.calls_driver:
        return  # it judges itself
    places = golden_paths(root, workload)
    if not any(place.is_file() for place in places):
        yield _row_finding(
            workload,
            "missing-golden",
            f"{workload.test_case!r} has no golden in {workload.environment} on "
            f"{workload.platform}, expected {places[0]}; run it with --golden record",
            Severity.ERROR if workload.disabled_reason is None else Severity.WARNING,
        )


def _row_finding(
    workload: Workload, rule: str, message: str, severity: Severity = Severity.ERROR
) -> Finding:
    """Return a finding on a row."""
    return Finding(
        file=workload.file, line=workload.line, rule=rule, message=message, severity=severity
    )


def _unreachable_goldens(workloads: Iterable[Workload], root: Path) -> Iterator[Finding]:
    """Yield the golden files that no row reads."""
    reached = {path for row in workloads for path in golden_paths(root, row)}
    for directory in (root / GOLDENS, root / CASES):
        for path in sorted(directory.rglob("golden_values*.json")):
            if path not in reached:
                yield Finding(
                    file=path,
                    line=None,
                    rule="unreachable-golden",
                    message="no row of the recipes reads this golden; remove it or add a row",
                    severity=Severity.WARNING,
                )

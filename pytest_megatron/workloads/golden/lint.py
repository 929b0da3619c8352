"""Reports goldens with which a run would fail for sure, or that no row reads.

Reads files, changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_megatron.base.findings import Finding, Severity, in_order
from pytest_megatron.base.yaml import YamlDocument as CaseDocument
from pytest_megatron.base.yaml import YamlError, read_document
from pytest_megatron.errors import GoldenError
from pytest_megatron.workloads.golden.model import (
    Golden,
    Series,
    find_not_finite,
    step_interval,
    without_unmeasured_end,
)
from pytest_megatron.workloads.golden.store import PATTERN, read_golden
from pytest_megatron.workloads.recipe.case import (
    CASE_NAME,
    CASES,
    GOLDENS,
    CaseMode,
    TestType,
    WorkloadCase,
    fingerprint,
    golden_paths,
    sound_case,
)
from pytest_megatron.workloads.recipe.expand import Profile
from pytest_megatron.workloads.recipe.load import read_recipes
from pytest_megatron.workloads.recipe.model import Vocabulary, Workload

# Megatron-LM writes the text "nan" there for a step that was not measured.
_MAY_BE_UNMEASURED = ("iteration-time", "num-zeros")
_DEPTH = 3  # model, test case, file


def _finding(
    golden: Golden, rule: str, message: str, severity: Severity = Severity.ERROR
) -> Finding:
    """Return a finding of a golden."""
    return Finding(file=Path(golden.path), line=None, rule=rule, message=message, severity=severity)


def check_content(golden: Golden) -> Iterator[Finding]:
    """Yield values of the file that nothing can be compared with."""
    rule, remedy = "golden-unreadable", "record it again"
    if golden.generation is not None and (problem := find_not_finite(golden.generation)):
        yield _finding(golden, rule, f"{problem}; {remedy}")
    for name, series in golden.metrics.items():
        if not len(series):
            yield _finding(golden, rule, f"{name}: no value; {remedy}")
        elif (bad := _find_not_finite(name, series)) is not None:
            step, value = bad
            what = f"the text {value!r}" if isinstance(value, str) else f"{value}"
            message = f"{name}: {what} at step {step}, expected a finite number; {remedy}"
            yield _finding(golden, rule, message)


def _find_not_finite(name: str, series: Series) -> tuple[int, float | str] | None:
    """Return the first value that is no finite number; text may say that a step has none."""
    numbers = [value for value in series.values if not isinstance(value, str)]
    bad = [(s, v) for s, v in series.items() if isinstance(v, str) or not math.isfinite(v)]
    is_ended = not any(isinstance(v, str) for v in without_unmeasured_end(series).values)
    is_text = all(isinstance(v, str) for _, v in bad)
    if not bad or (numbers and is_text and (name in _MAY_BE_UNMEASURED or is_ended)):
        return None
    return bad[0]


def check_against_case(golden: Golden, case: WorkloadCase) -> Iterator[Finding]:
    """Yield where the file does not fit the test case that it belongs to."""
    is_generation = golden.generation is not None
    if is_generation != (case.mode is CaseMode.INFERENCE):
        kind = "the output of an inference program" if is_generation else "series of a training"
        message = f"holds {kind}, MODE of {case.path} is {case.mode.value!r}; record it again"
        yield _finding(golden, "golden-metric", message)
        return
    for name in (case.metrics or ()) if case.needs_golden else ():
        if not _has_metric(golden, name):
            message = f"{case.path} compares {name!r}, which is not here; record it again"
            yield _finding(golden, "golden-metric", message)
    yield from _check_end(golden, case)


def _has_metric(golden: Golden, name: str) -> bool:
    """Return whether a golden has a metric, under either of its names."""
    if golden.generation is not None:
        return golden.generation.has(name)
    return name in golden.metrics or name.replace("-", " ") in golden.metrics


def _check_end(golden: Golden, case: WorkloadCase) -> Iterator[Finding]:
    """Yield the metrics that end before the training of their case does."""
    last = case.compared_end
    if last is None:
        return
    for name, series in golden.metrics.items():
        is_open = name in _MAY_BE_UNMEASURED or case.test_type is TestType.RELEASE
        steps = (series if is_open else without_unmeasured_end(series)).steps
        if steps and steps[-1] + step_interval(series.steps) <= last:
            message = f"{name}: ends at step {steps[-1]}, the training of {case.path} at {last}; "
            yield _finding(golden, "golden-truncated", f"{message}record it again")


def check_origin(
    golden: Golden, case: CaseDocument | None, rows: Sequence[Workload]
) -> Iterator[Finding]:
    """Yield that a golden was made of another case or row than those that read it."""
    made = None if golden.provenance is None else golden.provenance.config_hash
    now = [fingerprint(row, None if case is None else case.value) for row in rows]
    if made is not None and rows and made not in now:
        message = f"was made of another case or row: its config_hash is not {now[0]}, that of "
        message += f"{rows[0].where}; record it again"
        yield _finding(golden, "golden-stale", message, Severity.WARNING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """The parts of a project that its goldens are checked against.

    Attributes:
        recipes: Recipes and directories of recipes; without any, unread goldens are not reported.
    """

    root: Path
    recipes: tuple[Path, ...]
    vocabulary: Vocabulary


def _find_goldens(paths: Sequence[Path]) -> list[Path]:
    """Return the golden files among and below `paths`, each once, sorted.

    Raises:
        GoldenError: A path does not exist, or is a directory without goldens.
    """
    found: set[Path] = set()
    for path in paths:
        if path.is_dir():
            below = _goldens_below(path)
            if not below:
                raise GoldenError(str(path), f"holds no {PATTERN}; give a directory that does")
            found |= below
        elif path.is_file():
            found.add(path)
        else:
            raise GoldenError(str(path), "no such file or directory, expected goldens")
    return sorted(found)


def _goldens_below(directory: Path) -> set[Path]:
    return {path for path in directory.rglob(PATTERN) if path.is_file()}


def lint_goldens(paths: Sequence[Path], project: Project) -> GoldenLint:
    """Return the findings for the goldens among and below `paths`.

    Without `paths` the whole project is checked, and missing goldens are reported too. Where a
    recipe has errors, so that it is not known what its rows read, goldens that no other row reads
    are left alone.

    Raises:
        GoldenError: A path does not exist.
        RecipeError: The same of a recipe.
    """
    root = project.root
    everywhere = _goldens_below(root / GOLDENS) | _goldens_below(root / CASES)
    lint = GoldenLint(project)
    for file in _find_goldens(paths) if paths else sorted(everywhere):
        lint.look_at(file)
    return lint


class GoldenLint:
    """Check of one file after the other, and what it found.

    Attributes:
        num_goldens: Files that were looked at; `num_read` of them are read by a row.
        num_broken: Recipes with errors, whose rows are not known.
    """

    def __init__(self, project: Project) -> None:
        self._project = project
        self._cases: dict[Path, CaseDocument | None] = {}
        self._findings: list[Finding] = []
        self.num_goldens = self.num_read = 0
        loaded = read_recipes(project.recipes, Profile.STRICT, project.vocabulary)
        self._workloads = [workload for one in loaded for workload in one.workloads]
        self.num_broken = sum(bool(one.errors) for one in loaded)
        self._readers: dict[Path, list[Workload]] = {}
        for workload in self._workloads:
            places = golden_paths(project.root, workload)
            for place in [place for place in places if place.is_file()][:1]:
                self._readers.setdefault(place.absolute(), []).append(workload)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Those so far, errors first."""
        return in_order(self._findings)

    def look_at(self, path: Path) -> None:
        """Check one file; of one that nothing reads, say only that."""
        rows = self._readers.get(path.absolute(), ())
        self.num_goldens += 1
        self.num_read += bool(rows)
        parts = _parts_of(path, self._project.root)
        if parts and self._project.recipes and not rows:
            if not self.num_broken:
                message = "no row of the recipes reads this golden; remove it or add a row"
                unread = Golden(path=str(path), metrics={})
                self._findings.append(
                    _finding(unread, "unreachable-golden", message, Severity.WARNING)
                )
            return
        golden = self._read(path)
        if golden is None:
            return
        self._findings += check_content(golden)
        case = next((row.own_case for row in rows), None)
        if case is None and len(parts) == _DEPTH:
            case = self._case_at(self._project.root / CASES / Path(*parts[:-1]) / CASE_NAME)
        if case is not None and (sound := sound_case(case)) is not None:
            self._findings += check_against_case(golden, sound)
        self._findings += check_origin(golden, case, rows)

    def _read(self, path: Path) -> Golden | None:
        """Read a golden, and note why it cannot be read."""
        try:
            return read_golden(path)
        except GoldenError as error:
            where = error.where.removeprefix(str(path)).lstrip(":").partition(":")[0]
            line = int(where) if where.isdecimal() else None
            finding = Finding(file=path, line=line, rule="golden-unreadable", message=error.problem)
            self._findings.append(finding)
            return None

    def _case_at(self, path: Path) -> CaseDocument | None:
        """Return a case, read once; None if it is not there."""
        if path not in self._cases:
            try:
                self._cases[path] = read_document(path) if path.is_file() else None
            except YamlError:
                self._cases[path] = None  # `pytest-megatron lint` says what is wrong with it
        return self._cases[path]


def _parts_of(path: Path, root: Path) -> tuple[str, ...]:
    """Return the parts of a path below a tree of goldens; none elsewhere."""
    for tree in (root.absolute() / GOLDENS, root.absolute() / CASES):
        if path.absolute().is_relative_to(tree):
            return path.absolute().relative_to(tree).parts
    return ()

"""Reports goldens with which a run would fail for sure, or that no row reads.

Reads files and asks git; changes nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_megatron.base.files import JsonValue
from pytest_megatron.base.findings import Finding, Severity, in_order
from pytest_megatron.base.project import ask_git
from pytest_megatron.base.yaml import YamlDocument as CaseDocument
from pytest_megatron.base.yaml import YamlError, parse_document, read_document
from pytest_megatron.errors import GoldenError
from pytest_megatron.workloads.golden.model import (
    Golden,
    Series,
    find_not_finite,
    step_interval,
    without_unmeasured_end,
)
from pytest_megatron.workloads.golden.store import PATTERN, parse_golden, read_text
from pytest_megatron.workloads.recipe.case import (
    CASE_NAME,
    CASES,
    GOLDENS,
    CaseMode,
    TestType,
    WorkloadCase,
    case_path,
    fingerprint,
    golden_paths,
    sound_case,
)
from pytest_megatron.workloads.recipe.expand import Profile
from pytest_megatron.workloads.recipe.lint import check_golden
from pytest_megatron.workloads.recipe.load import read_recipes
from pytest_megatron.workloads.recipe.model import Vocabulary, Workload

# Megatron-LM writes the text "nan" there for a step that was not measured.
_MAY_BE_UNMEASURED = ("iteration-time", "num-zeros")
_DEPTH = 3  # model, test case, file


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenFile:
    """One golden file that could be read.

    Attributes:
        text: Its JSON, for the lines of findings.
    """

    path: Path
    text: str
    content: Golden

    def finding(
        self,
        rule: str,
        message: str,
        *,
        line: int | None = None,
        severity: Severity = Severity.ERROR,
    ) -> Finding:
        """Return a finding of this file."""
        return Finding(file=self.path, line=line, rule=rule, message=message, severity=severity)

    def line_of(self, name: str, step: int | None = None) -> int | None:
        """Return the line of a top-level key, or of a step below it."""
        at = self.text.find(f"{json.dumps(name)}:")
        if at >= 0 and step is not None:
            at = max(at, self.text.find(f'"{step}":', self.text.find('"values"', at)))
        return None if at < 0 else self.text.count("\n", 0, at) + 1


def check_content(golden: GoldenFile) -> Iterator[Finding]:
    """Yield values of the file that nothing can be compared with."""
    generation = golden.content.generation
    if generation is not None and (problem := find_not_finite(generation)):
        yield golden.finding("golden-unreadable", f"{problem}; record it again")
    for name, series in golden.content.metrics.items():
        if not len(series):
            message = f"{name}: no value; record it again"
            yield golden.finding("golden-unreadable", message, line=golden.line_of(name))
        elif (bad := _find_not_finite(name, series)) is not None:
            step, value = bad
            what = f"the text {value!r}" if isinstance(value, str) else f"{value}"
            message = f"{name}: {what} at step {step}, expected a finite number; record it again"
            yield golden.finding("golden-unreadable", message, line=golden.line_of(name, step))


def _find_not_finite(name: str, series: Series) -> tuple[int, float | str] | None:
    """Return the first value that is no finite number; text may say that a step has none."""
    numbers = [value for value in series.values if not isinstance(value, str)]
    bad = [(s, v) for s, v in series.items() if isinstance(v, str) or not math.isfinite(v)]
    is_ended = not any(isinstance(v, str) for v in without_unmeasured_end(series).values)
    is_text = all(isinstance(v, str) for _, v in bad)
    if not bad or (numbers and is_text and (name in _MAY_BE_UNMEASURED or is_ended)):
        return None
    return bad[0]


def check_against_case(golden: GoldenFile, case: WorkloadCase) -> Iterator[Finding]:
    """Yield where the file does not fit the test case that it belongs to."""
    is_generation = golden.content.generation is not None
    if is_generation != (case.mode is CaseMode.INFERENCE):
        kind = "the output of an inference program" if is_generation else "series of a training"
        message = f"holds {kind}, MODE of {case.path} is {case.mode.value!r}; record it again"
        yield golden.finding("golden-metric", message)
        return
    for name in (case.metrics or ()) if case.needs_golden else ():
        if not _has_metric(golden.content, name):
            message = f"{case.path} compares {name!r}, which is not here; record it again"
            yield golden.finding("golden-metric", message)
    yield from _check_end(golden, case)


def _has_metric(golden: Golden, name: str) -> bool:
    """Return whether a golden has a metric, under either of its names."""
    if golden.generation is not None:
        return golden.generation.has(name)
    return name in golden.metrics or name.replace("-", " ") in golden.metrics


def _check_end(golden: GoldenFile, case: WorkloadCase) -> Iterator[Finding]:
    """Yield the metrics that end before the training of their case does, those at one step once."""
    last = case.compared_end
    if last is None:
        return
    ends: dict[int, list[str]] = {}
    for name, series in golden.content.metrics.items():
        is_open = name in _MAY_BE_UNMEASURED or case.test_type is TestType.RELEASE
        steps = (series if is_open else without_unmeasured_end(series)).steps
        if steps and steps[-1] + step_interval(series.steps) <= last:
            ends.setdefault(steps[-1], []).append(name)
    for end, names in ends.items():
        message = f"{', '.join(names)}: ends at step {end}, the training of {case.path} at {last}; "
        line = golden.line_of(names[0])
        yield golden.finding("golden-truncated", f"{message}record it again", line=line)


def check_origin(
    golden: GoldenFile, case: CaseDocument | None, rows: Sequence[Workload], root: Path
) -> Iterator[Finding]:
    """Yield signs that a golden is of another case or row than the project's.

    Args:
        golden: The golden.
        case: The test case as it is now; None where there is none.
        rows: Those that read the golden.
        root: The project, whose git has the case as it was.
    """
    provenance = golden.content.provenance
    if provenance is None or not rows:
        return
    now = [fingerprint(row, None if case is None else case.value) for row in rows]
    message = ""
    if provenance.config_hash is not None:
        if provenance.config_hash not in now:
            message = f"was made of another case or row: its config_hash is not {now[0]}, that of "
            message += f"{rows[0].where}; record it again"
    elif provenance.commit is not None and case is not None and rows[0].own_case is None:
        then = _case_at(root, provenance.commit, case.file)
        if then is not None and fingerprint(rows[0], then) != now[0]:
            message = f"was made at commit {provenance.commit}, {case.file} has changed since; "
            message += "record it again"
    if message:
        line = golden.line_of("_provenance")
        yield golden.finding("golden-stale", message, line=line, severity=Severity.WARNING)


def _case_at(root: Path, commit: str, path: Path) -> Mapping[str, JsonValue] | None:
    """Return a case as a commit has it; None where it does not, or cannot be read."""
    name = path.absolute().relative_to(root.absolute()).as_posix()
    text = None if commit.startswith("-") else ask_git(root, "show", f"{commit}:./{name}")
    try:
        return None if text is None else parse_document(text, path).value
    except YamlError:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """The parts of a project that its goldens are checked against.

    Attributes:
        recipes: Recipes and directories of recipes; without any, unread goldens are not reported.
        other_names: Other names of platforms, in the names of goldens.
    """

    root: Path
    recipes: tuple[Path, ...]
    vocabulary: Vocabulary
    other_names: Mapping[str, str]


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
    if not paths:
        lint.look_at_rows()
    return lint


class GoldenLint:
    """Check of one file after the other, and what it found.

    Attributes:
        num_goldens: Files that were looked at; `num_read` of them are read by a row.
        num_bytes: How much was read.
        num_broken: Recipes with errors, whose rows are not known.
    """

    def __init__(self, project: Project) -> None:
        self._project = project
        self._cases: dict[Path, CaseDocument | None] = {}
        self._findings: list[Finding] = []
        self.num_goldens = self.num_read = self.num_bytes = 0
        loaded = read_recipes(project.recipes, Profile.STRICT, project.vocabulary)
        self._workloads = [workload for one in loaded for workload in one.workloads]
        self.num_broken = sum(bool(one.errors) for one in loaded)
        self._readers: dict[Path, list[Workload]] = {}
        self._shadowed: dict[Path, Path] = {}
        for workload in self._workloads:
            places = golden_paths(project.root, workload, project.other_names)
            existing = [place for place in places if place.is_file()]
            for place in existing[:1]:
                self._readers.setdefault(place.absolute(), []).append(workload)
            for place in existing[1:]:
                self._shadowed[place.absolute()] = existing[0]

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
                self._findings.append(_unreachable(path, self._shadowed.get(path.absolute())))
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
        self._findings += check_origin(golden, case, rows, self._project.root)

    def look_at_rows(self) -> None:
        """Check the recipes for goldens that are missing."""
        root, other_names = self._project.root, self._project.other_names
        for workload in self._workloads:
            document = workload.own_case or self._case_at(case_path(root, workload))
            case = None if document is None else sound_case(document)
            if case is not None and case.needs_golden:
                self._findings += check_golden(workload, root, other_names)

    def _read(self, path: Path) -> GoldenFile | None:
        """Read a golden, and note why it cannot be read."""
        try:
            text = read_text(path)
            self.num_bytes += len(text)
            golden = parse_golden(text, str(path))
        except GoldenError as error:
            where = error.where.removeprefix(str(path)).lstrip(":").partition(":")[0]
            line = int(where) if where.isdecimal() else None
            finding = Finding(file=path, line=line, rule="golden-unreadable", message=error.problem)
            self._findings.append(finding)
            return None
        return GoldenFile(path=path, text=text, content=golden)

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


def _unreachable(path: Path, other: Path | None) -> Finding:
    message = "no row of the recipes reads this golden; remove it or add a row"
    if other is not None:
        message = f"{other} is read instead of this; remove one of the two"
    return Finding(
        file=path, line=None, rule="unreachable-golden", message=message, severity=Severity.WARNING
    )

"""Reports faults of the goldens of a project: of each, and of them as a set.

Reads files and asks git; changes nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pytest_megatron.base.files import JsonValue
from pytest_megatron.base.findings import Finding, Severity, in_order
from pytest_megatron.base.project import ask_git
from pytest_megatron.base.text import nearest
from pytest_megatron.base.yaml import YamlDocument as CaseDocument
from pytest_megatron.base.yaml import YamlError, parse_document, read_document
from pytest_megatron.errors import EmptyGoldenError, GoldenError
from pytest_megatron.workloads.golden.compare.result import without_unmeasured_end
from pytest_megatron.workloads.golden.model import (
    Provenance,
    Series,
    find_not_finite,
    parse_provenance,
    step_interval,
)
from pytest_megatron.workloads.golden.store import (
    PATTERN,
    GoldenDocument,
    GoldenOwner,
    document_of,
    load_object,
    owner_of,
    place_of,
    read_text,
    tree_of,
)
from pytest_megatron.workloads.recipe.case import (
    CASE_NAME,
    CASES,
    GOLDENS,
    case_path,
    compared_metrics,
    compares_metrics,
    fingerprint,
    golden_paths,
    last_step,
)
from pytest_megatron.workloads.recipe.expand import Profile
from pytest_megatron.workloads.recipe.lint import check_golden
from pytest_megatron.workloads.recipe.load import find_recipes, read_recipe
from pytest_megatron.workloads.recipe.model import Vocabulary, Workload

# Megatron-LM writes the text "nan" there for a step that was not measured.
_MAY_BE_UNMEASURED = ("iteration-time", "num-zeros")
_ENDED_BY_TIME = "release"  # text after its last number is not the golden's fault
_MIN_REPEATS = 2
_MIN_VALUES = 8  # fewer may have few decimals by chance
_COARSE = 8.0  # from here on a float32 has hardly more than five decimals
_DECIMALS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenFile:
    """One golden file that could be read.

    Attributes:
        value: The JSON object of the file.
        text: The text of that, for the lines of findings.
        is_ours: True if it lies in `golden_values/`.
        is_read: True if a row of the recipes reads it; problems of an unread file are no errors.
    """

    path: Path
    text: str
    value: Mapping[str, JsonValue]
    document: GoldenDocument
    is_ours: bool
    is_read: bool

    @property
    def provenance(self) -> Provenance | None:
        """The provenance, None without one.

        Raises:
            GoldenError: It is broken.
        """
        value = self.document.provenance
        return None if value is None else parse_provenance(value, str(self.path))

    def line_of(self, name: str, step: int | None = None) -> int | None:
        """Return the line of a top-level key, or of a step below it."""
        at = self.text.find(f"{json.dumps(name)}:")
        if at >= 0 and step is not None:
            at = max(at, self.text.find(f'"{step}":', self.text.find('"values"', at)))
        return None if at < 0 else self.text.count("\n", 0, at) + 1

    def finding(
        self, rule: str, message: str, *, line: int | None = None, is_error: bool = False
    ) -> Finding:
        """Return a finding of this file."""
        severity = Severity.ERROR if is_error and self.is_read else Severity.WARNING
        return Finding(file=self.path, line=line, rule=rule, message=message, severity=severity)


class FindingGroup:
    """Findings of one file, in which metrics with the same problem share one."""

    def __init__(self, golden: GoldenFile) -> None:
        """Begin without findings."""
        self.golden = golden
        self._names: dict[tuple[str, str], list[str]] = {}

    def add(self, rule: str, name: str, message: str) -> None:
        """Add a problem of one metric."""
        self._names.setdefault((rule, message), []).append(name)

    def findings(self) -> Iterator[Finding]:
        """Yield the findings."""
        for (rule, message), names in self._names.items():
            is_error = rule in ("golden-empty", "golden-truncated")
            line = self.golden.line_of(names[0])
            yield self.golden.finding(
                rule, f"{', '.join(names)}: {message}", line=line, is_error=is_error
            )


def check_content(golden: GoldenFile) -> Iterator[Finding]:
    """Yield the problems of the file itself."""
    yield from _check_provenance(golden)
    generation = golden.document.generation
    if generation is not None and (problem := find_not_finite(generation)):
        message = f"{problem}; record it again"
        yield golden.finding("golden-not-finite", message, is_error=True)
    together = FindingGroup(golden)
    for name, series in golden.document.metrics.items():
        if not len(series):
            together.add("golden-empty", name, "no value; record it again")
            continue
        yield from _check_finite(golden, name, series)
        _check_steps(together, name, series)
        _check_precision(together, name, series)
    yield from together.findings()


def check_against_case(golden: GoldenFile, case: CaseDocument) -> Iterator[Finding]:
    """Yield where the file does not fit the test case that it belongs to."""
    is_generation = golden.document.generation is not None
    mode = case.value.get("MODE", "pretraining")
    if is_generation != (mode == "inference"):
        kind = "the output of an inference program" if is_generation else "series of a training"
        message = f"holds {kind}, MODE of {case.file} is {mode!r}; record it again"
        yield golden.finding("golden-kind", message, is_error=True)
        return
    for name in compared_metrics(case):
        if not _has_metric(golden.document, name):
            message = f"{case.file} compares {name!r}, which is not here; record it again"
            yield golden.finding("golden-metric", message, is_error=True)
    last = last_step(case)
    if last is None:
        return
    together = FindingGroup(golden)
    for name, series in golden.document.metrics.items():
        is_open = name in _MAY_BE_UNMEASURED or case.value.get("TEST_TYPE") == _ENDED_BY_TIME
        steps = (series if is_open else without_unmeasured_end(series)).steps
        if steps and steps[-1] + step_interval(series.steps) <= last:
            message = f"ends at step {steps[-1]}, the training of {case.file} at {last}; "
            together.add("golden-truncated", name, f"{message}record it again")
    yield from together.findings()


def _has_metric(document: GoldenDocument, name: str) -> bool:
    """Return whether a golden has a metric, under either of its names."""
    if document.generation is not None:
        return document.generation.has(name)
    return name in document.metrics or name.replace("-", " ") in document.metrics


def _check_provenance(golden: GoldenFile) -> Iterator[Finding]:
    """Yield what is wrong with the origin of a golden."""
    line = golden.line_of("_provenance")
    try:
        provenance = golden.provenance
    except GoldenError as error:
        yield golden.finding("golden-provenance", error.problem, line=line, is_error=True)
        return
    if provenance is not None:
        for message in _doubts(provenance):
            yield golden.finding("golden-provenance", f"{message}; record it again", line=line)
    elif golden.is_ours:
        message = "has no _provenance, so nobody knows what it was measured with; record it again"
        yield golden.finding("golden-provenance", message)


def _doubts(provenance: Provenance) -> Iterator[str]:
    """Yield what is doubtful about the origin of a golden."""
    if provenance.commit is None:
        yield "names no commit"
    if provenance.is_dirty:
        yield "was made with changes that no commit has"
    if provenance.repeats is not None and provenance.repeats < _MIN_REPEATS:
        yield f"was made from {provenance.repeats} run, so nobody knows how far runs differ"


def _check_finite(golden: GoldenFile, name: str, series: Series) -> Iterator[Finding]:
    """Yield the values of a metric that are no finite numbers."""
    numbers = [value for value in series.values if not isinstance(value, str)]
    if len(numbers) == len(series) and all(map(math.isfinite, numbers)):
        return
    bad = [(s, v) for s, v in series.items() if isinstance(v, str) or not math.isfinite(v)]
    step, value = bad[0]
    what = f"the text {value!r}" if isinstance(value, str) else f"{value}"
    message = f"{name}: {len(bad)} of {len(series)} values are no finite number, the first {what}"
    is_ended = not any(isinstance(v, str) for v in without_unmeasured_end(series).values)
    is_known = (name in _MAY_BE_UNMEASURED or is_ended) and all(isinstance(v, str) for _, v in bad)
    ending = "not compared there" if is_known and numbers else "record it again"
    yield golden.finding(
        "golden-not-finite",
        f"{message} at step {step}; {ending}",
        line=golden.line_of(name, step),
        is_error=not is_known,
    )


def _check_steps(group: FindingGroup, name: str, series: Series) -> None:
    """Note holes in the steps of a metric."""
    first, last = series.steps[0], series.steps[-1]
    interval = step_interval(series.steps)
    spaced = [step for step in series.steps if step != 1] or [first]
    missing = sorted({*range(spaced[0], last + 1, interval)} - {*spaced})
    if missing:
        message = f"{len(missing)} of the steps {first} to {last} are missing, the first is "
        group.add("golden-steps", name, f"{message}{missing[0]}; record it again")
        return
    block = group.golden.value[name]
    assert isinstance(block, dict)
    said = (block.get("start_step"), block.get("end_step"), block.get("step_interval"))
    is_single = len(spaced) < 2  # noqa: PLR2004 - then no distance is wrong
    if said[:2] != (first, last) or not (is_single or said[2] == interval):
        message = f"start_step, end_step and step_interval are {said[0]}, {said[1]} and {said[2]}, "
        message += f"those of the values {first}, {last} and {interval}; correct them"
        group.add("golden-steps", name, message)


def _check_precision(group: FindingGroup, name: str, series: Series) -> None:
    """Note values that were rounded."""
    if not series.is_full_precision:
        if group.golden.document.provenance is not None:
            group.add("golden-precision", name, "five decimals; record it again for all of them")
        return
    broken = [v for v in series.values if isinstance(v, float) and 0 < abs(v % 1) < 1]
    small = [v for v in broken if abs(v) < _COARSE]
    if len(small) >= _MIN_VALUES and all(round(v, _DECIMALS) == v for v in small):
        message = "says full precision, and no value has more than five decimals; record it again"
        group.add("golden-precision", name, message)


@dataclass(slots=True)
class Commits:
    """Look-ups of commits in a repository; empty without git or without the whole history."""

    root: Path
    _known: dict[str, bool] = field(default_factory=dict)
    _is_complete: bool | None = None

    def lacks(self, commit: str) -> bool:
        """Return True if the repository has all its history, and no such commit."""
        if self._is_complete is None:
            shallow = ask_git(self.root, "rev-parse", "--is-shallow-repository")
            self._is_complete = shallow == "false"
        if commit not in self._known:
            word = None if commit.startswith("-") else ask_git(self.root, "cat-file", "-t", commit)
            self._known[commit] = word == "commit"
        return self._is_complete and not self._known[commit]

    def case_at(self, commit: str, path: Path) -> Mapping[str, JsonValue] | None:
        """Return a case as a commit has it; None where it does not, or cannot be read."""
        if self.lacks(commit) or not self._known[commit]:
            return None
        name = path.absolute().relative_to(self.root.absolute()).as_posix()
        text = ask_git(self.root, "show", f"{commit}:./{name}")
        try:
            return None if text is None else parse_document(text, path).value
        except YamlError:
            return None


def check_origin(
    golden: GoldenFile, case: CaseDocument | None, rows: Sequence[Workload], commits: Commits
) -> Iterator[Finding]:
    """Yield signs that a golden is of another case, row or history than the project's.

    Args:
        golden: The golden.
        case: The test case as it is now; None where there is none.
        rows: Those that read the golden.
        commits: Commits of the project.
    """
    try:
        provenance = golden.provenance
    except GoldenError:
        return  # reported with the content of the file
    if provenance is None:
        return
    line = golden.line_of("_provenance")
    commit = provenance.commit
    if commit is not None and commits.lacks(commit):
        message = f"was made at commit {commit}, which the repository does not have; "
        yield golden.finding("golden-commit", f"{message}record it again", line=line)
    if not rows:
        return
    now = [fingerprint(row, None if case is None else case.value) for row in rows]
    if provenance.config_hash is not None:
        if provenance.config_hash not in now:
            message = f"was made of another case or row: its config_hash is not {now[0]}, that of "
            message += f"{rows[0].where}; record it again"
            yield golden.finding("golden-stale", message, line=line)
    elif commit is not None and case is not None and rows[0].own_case is None:
        then = commits.case_at(commit, case.file)
        if then is not None and fingerprint(rows[0], then) != now[0]:
            message = f"was made at commit {commit}, {case.file} has changed since; record it again"
            yield golden.finding("golden-stale", message, line=line)


def find_copies(goldens: Iterable[GoldenFile]) -> Iterator[Finding]:
    """Yield the goldens that are equal to an earlier one, times included: those never repeat."""
    first: dict[int, GoldenFile] = {}
    for golden in goldens:
        metrics, generation = golden.document.metrics, golden.document.generation
        if generation is not None and not generation.throughput:
            continue
        if generation is None and "iteration-time" not in metrics:
            continue
        content = [(name, series.steps, series.values) for name, series in metrics.items()]
        other = first.setdefault(hash((tuple(content), repr(generation))), golden)
        is_equal = (other.document.metrics, other.document.generation) == (metrics, generation)
        if other is not golden and is_equal:
            message = f"holds the same values as {other.path}, times included: one of them was "
            yield golden.finding("golden-copy", f"{message}copied, not measured; record it again")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The result of a lint run.

    Attributes:
        num_goldens: Files that were looked at; `num_read` of them are read by a row.
    """

    findings: tuple[Finding, ...]
    num_goldens: int
    num_read: int
    num_bytes: int


def find_goldens(paths: Sequence[Path]) -> list[Path]:
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


def lint_goldens(paths: Sequence[Path], project: Project) -> Report:
    """Return the findings for the goldens among and below `paths`.

    Without `paths` the whole project is checked, and missing goldens are reported too.

    Raises:
        GoldenError: A path does not exist.
        RecipeError: The same of a recipe.
    """
    root = project.root
    everywhere = _goldens_below(root / GOLDENS) | _goldens_below(root / CASES)
    files = find_goldens(paths) if paths else sorted(everywhere)
    linter = _Linter(project)
    for file in files:
        linter.look_at(file)
    linter.compare()
    if not paths:
        linter.look_at_rows()
    return Report(
        findings=in_order(linter.findings),
        num_goldens=len(files),
        num_read=sum(file.absolute() in linter.readers for file in files),
        num_bytes=linter.num_bytes,
    )


class _Linter:
    """Check of one file after the other, with the state for comparing them.

    Attributes:
        findings: Those so far.
        num_bytes: How much was read so far.
        readers: The rows that read a golden, by its absolute path.
    """

    def __init__(self, project: Project) -> None:
        self._project = project
        self._cases: dict[Path, CaseDocument | None] = {}
        self._goldens: list[tuple[GoldenFile, GoldenOwner | None]] = []
        self.findings: list[Finding] = []
        self.num_bytes = 0
        files = find_recipes(project.recipes)
        loaded = [read_recipe(file, Profile.STRICT, project.vocabulary) for file in files]
        rows = [workload for one in loaded for workload in one.workloads]
        self._workloads = [row for row in rows if row.equivalence is None]
        self._recipe_findings = [_broken_recipe(one.errors) for one in loaded if one.errors]
        self.readers: dict[Path, list[Workload]] = {}
        self._shadowed: dict[Path, Path] = {}
        for workload in self._workloads:
            places = golden_paths(project.root, workload, project.other_names)
            existing = [place for place in places if place.is_file()]
            for place in existing[:1]:
                self.readers.setdefault(place.absolute(), []).append(workload)
            for place in existing[1:]:
                self._shadowed[place.absolute()] = existing[0]

    def look_at(self, path: Path) -> None:
        """Check one file and its place."""
        place = place_of(path, self._project.root, self._project.vocabulary.environments)
        if place is not None and place.is_second_run:
            message = "is the dump of a second run, which nothing reads; remove it"
            self._add(path, "golden-second-run", message)
            return
        problem = self._misplaced(path) if place is None else self._unread(path, place)
        if problem is not None:
            self._add(path, *problem)
        golden = self._read(path)
        if golden is None:
            return
        self._goldens.append((golden, place))
        self.findings += check_content(golden)
        case = None if place is None else self._case_of(place, path)
        if case is not None:
            self.findings += check_against_case(golden, case)

    def look_at_rows(self) -> None:
        """Check the recipes for goldens that are missing."""
        self.findings += self._recipe_findings
        root, other_names = self._project.root, self._project.other_names
        for workload in self._workloads:
            case = workload.own_case or self._case_at(case_path(root, workload))
            if case is not None and compares_metrics(case):
                self.findings += check_golden(workload, root, other_names)

    def compare(self) -> None:
        """Check the files against one another and against the repository's history."""
        self.findings += find_copies(golden for golden, _ in self._goldens)
        commits = Commits(self._project.root)
        for golden, place in self._goldens:
            if place is not None:
                rows = self.readers.get(golden.path.absolute(), ())
                case = self._case_of(place, golden.path)
                self.findings += check_origin(golden, case, rows, commits)

    def _add(self, path: Path, rule: str, message: str) -> None:
        self.findings.append(_finding(path, None, rule, message))

    def _misplaced(self, path: Path) -> tuple[str, str] | None:
        """Return rule and message for a golden where nothing looks, None else."""
        root = self._project.root.absolute()
        if not path.absolute().is_relative_to(root):
            return None  # of no project: nothing is known about where it belongs
        if owner_of(path, root) is not None:
            environments = ", ".join(sorted(self._project.vocabulary.environments))
            message = f"{path.name!r} names no environment, expected golden_values_<environment>_"
            return "golden-name", f"{message}<platform>.json with one of {environments}; rename it"
        where = GOLDENS / "<model>/<test_case>"
        return "golden-misplaced", f"nothing looks for goldens here, expected {where}; move it"

    def _unread(self, path: Path, owner: GoldenOwner) -> tuple[str, str] | None:
        """Return why nothing reads a golden that lies where goldens lie."""
        absolute = path.absolute()
        if absolute in self._shadowed:
            counts = self._shadowed[absolute]
            return "golden-duplicate", f"{counts} is read instead of this; remove one of the two"
        case = _config_of(self._project.root, owner)
        is_known = absolute in self.readers
        if not is_known and not case.is_file():
            return "golden-orphan", f"there is no {case}; remove it, or move it to its case"
        platforms = self._project.vocabulary.platforms
        if not is_known and owner.platform not in platforms | self._project.other_names.keys():
            message, key = "names no platform", '""'
            if owner.platform:
                message = f"unknown platform {owner.platform!r}{nearest(owner.platform, platforms)}"
                key = owner.platform
            message += f"; say in [tool.pytest-megatron] golden-platforms which one {key} is, or "
            return "golden-name", f"{message}remove it"
        if not is_known and self._project.recipes:
            message = "no row of the recipes reads this golden; remove it or add a row"
            return "unreachable-golden", message
        return None

    def _read(self, path: Path) -> GoldenFile | None:
        """Read a golden, and note why it cannot be read."""
        tree = tree_of(path, self._project.root)
        is_known = tree is not None and bool(self._project.recipes)
        is_read = path.absolute() in self.readers or not is_known
        try:
            text = read_text(path)
            self.num_bytes += len(text)
            value, notes = load_object(text, str(path))
            document = document_of(value, str(path), notes)
        except GoldenError as error:
            rule = "golden-empty" if isinstance(error, EmptyGoldenError) else "golden-unreadable"
            severity = Severity.ERROR if is_read else Severity.WARNING
            where = error.where.removeprefix(str(path)).lstrip(":").partition(":")[0]
            line = int(where) if where.isdecimal() else None
            self.findings.append(_finding(path, line, rule, error.problem, severity))
            return None
        return GoldenFile(
            path=path,
            text=text,
            value=value,
            document=document,
            is_ours=tree == GOLDENS,
            is_read=is_read,
        )

    def _case_of(self, owner: GoldenOwner, path: Path) -> CaseDocument | None:
        """Return the case of a golden: of the row that reads it, or the file of its place."""
        own = (row.own_case for row in self.readers.get(path.absolute(), ()))
        return next(own, None) or self._case_at(_config_of(self._project.root, owner))

    def _case_at(self, path: Path) -> CaseDocument | None:
        """Return a case, read once; None if it is not there."""
        if path not in self._cases:
            try:
                self._cases[path] = read_document(path) if path.is_file() else None
            except YamlError:
                self._cases[path] = None  # `pytest-megatron lint` says what is wrong with it
        return self._cases[path]


def _config_of(root: Path, owner: GoldenOwner) -> Path:
    return root / CASES / owner.case / CASE_NAME


def _broken_recipe(errors: Sequence[Finding]) -> Finding:
    """Return the finding that a recipe has errors."""
    message = f"has errors, the first {errors[0]}; its goldens may seem to be read by no row; see "
    message += "`pytest-megatron lint`"
    return _finding(errors[0].file, errors[0].line, "golden-recipes", message)


def _finding(
    file: Path,
    line: int | None,
    rule: str,
    message: str,
    severity: Severity = Severity.WARNING,
) -> Finding:
    """Return a finding, by default a warning."""
    return Finding(file=file, line=line, rule=rule, message=message, severity=severity)

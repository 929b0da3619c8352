"""Reports faults of the goldens of a project: of each, and of them as a set.

Reads files and asks git; changes nothing. The content of one file is `checks.py`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_megatron.base.text import nearest
from pytest_megatron.base.yaml import YamlDocument as CaseDocument
from pytest_megatron.base.yaml import YamlError, read_document
from pytest_megatron.errors import EmptyGoldenError, GoldenError
from pytest_megatron.golden.lint.checks import (
    Commits,
    GoldenFile,
    check_against_case,
    check_content,
    check_origin,
    find_copies,
)
from pytest_megatron.golden.store import (
    PATTERN,
    GoldenOwner,
    document_of,
    load_object,
    owner_of,
    place_of,
    read_text,
    tree_of,
)
from pytest_megatron.recipe.case import (
    CASE_NAME,
    CASES,
    GOLDENS,
    case_path,
    compares_metrics,
    golden_paths,
)
from pytest_megatron.recipe.expand import Profile
from pytest_megatron.recipe.findings import Finding, Severity, in_order
from pytest_megatron.recipe.lint import check_golden
from pytest_megatron.recipe.load import find_recipes, read_recipe
from pytest_megatron.recipe.model import Vocabulary, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """The parts of a project that its goldens are checked against.

    Attributes:
        recipes: Recipes and directories of recipes; without any, unread goldens are not reported.
        other_names: Of platforms, in the names of goldens.
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
        self._sheets: list[tuple[GoldenFile, GoldenOwner | None]] = []
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
        sheet = self._read(path)
        if sheet is None:
            return
        self._sheets.append((sheet, place))
        self.findings += check_content(sheet)
        case = None if place is None else self._case_of(place)
        if case is not None:
            self.findings += check_against_case(sheet, case)

    def look_at_rows(self) -> None:
        """Check the recipes for goldens that are missing."""
        self.findings += self._recipe_findings
        root, other_names = self._project.root, self._project.other_names
        for workload in self._workloads:
            case = self._case_at(case_path(root, workload))
            if case is not None and compares_metrics(case):
                self.findings += check_golden(workload, root, other_names)

    def compare(self) -> None:
        """Check the files against one another and against the repository's history."""
        self.findings += find_copies(sheet for sheet, _ in self._sheets)
        commits = Commits(self._project.root)
        for sheet, place in self._sheets:
            if place is not None:
                rows = self.readers.get(sheet.path.absolute(), ())
                self.findings += check_origin(sheet, self._case_of(place), rows, commits)

    def _add(self, path: Path, rule: str, message: str) -> None:
        self.findings.append(_finding(path, None, rule, message))

    def _misplaced(self, path: Path) -> tuple[str, str] | None:
        root = self._project.root.absolute()
        if not path.absolute().is_relative_to(root):
            return None  # of no project: nothing is known about where it belongs
        if owner_of(path, root) is not None:
            environments = ", ".join(sorted(self._project.vocabulary.environments))
            message = f"{path.name!r} names no environment, expected golden_values_<environment>_"
            return "golden-name", f"{message}<platform>.json with one of {environments}; rename it"
        where = GOLDENS / "<model>/<test_case>"
        return "golden-misplaced", f"nothing looks for goldens here, expected {where}; move it"

    def _unread(self, path: Path, place: GoldenOwner) -> tuple[str, str] | None:
        """Return why nothing reads a golden that lies where goldens lie."""
        absolute = path.absolute()
        if absolute in self._shadowed:
            counts = self._shadowed[absolute]
            return "golden-duplicate", f"{counts} is read instead of this; remove one of the two"
        case = _config_of(self._project.root, place)
        is_known = absolute in self.readers
        if not is_known and not case.is_file():
            return "golden-orphan", f"there is no {case}; remove it, or move it to its case"
        platforms = self._project.vocabulary.platforms
        if not is_known and place.platform not in platforms | self._project.other_names.keys():
            message, key = "names no platform", '""'
            if place.platform:
                message = f"unknown platform {place.platform!r}{nearest(place.platform, platforms)}"
                key = place.platform
            message += f"; say in [tool.pytest-megatron] golden-platforms which one {key} is, or "
            return "golden-name", f"{message}remove it"
        if not is_known and self._project.recipes:
            message = "no row of the recipes reads this golden; remove it or add a row"
            return "unreachable-golden", message
        return None

    def _read(self, path: Path) -> GoldenFile | None:
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

    def _case_of(self, place: GoldenOwner) -> CaseDocument | None:
        return self._case_at(_config_of(self._project.root, place))

    def _case_at(self, path: Path) -> CaseDocument | None:
        if path not in self._cases:
            try:
                self._cases[path] = read_document(path) if path.is_file() else None
            except YamlError:
                self._cases[path] = None  # `pytest-megatron lint` says what is wrong with it
        return self._cases[path]


def _config_of(root: Path, place: GoldenOwner) -> Path:
    return root / CASES / place.model / place.test_case / CASE_NAME


def _broken_recipe(errors: Sequence[Finding]) -> Finding:
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
    return Finding(file=file, line=line, rule=rule, message=message, severity=severity)

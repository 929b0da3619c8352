"""Whether goldens are what their provenance says: of this history, of this case, measured.

Reads what git knows and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pytest_megatron.errors import GoldenError
from pytest_megatron.files import JsonValue
from pytest_megatron.git import ask_git
from pytest_megatron.golden.checks import GoldenFile
from pytest_megatron.golden.provenance import Provenance, parse_provenance
from pytest_megatron.recipe.findings import RecipeFinding
from pytest_megatron.recipe.fingerprint import fingerprint
from pytest_megatron.recipe.model import Workload
from pytest_megatron.yamllines import YamlDocument as CaseDocument
from pytest_megatron.yamllines import YamlError, parse_document


@dataclass(slots=True)
class Commits:
    """What a repository knows of commits; nothing where there is no git or not all history."""

    root: Path
    _known: dict[str, bool] = field(default_factory=dict)
    _is_complete: bool | None = None

    def lacks(self, commit: str) -> bool:
        """Whether the repository has all its history and no such commit in it."""
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
    sheet: GoldenFile, case: CaseDocument | None, rows: Sequence[Workload], commits: Commits
) -> Iterator[RecipeFinding]:
    """Yield why a golden may be of another case, row or history than the project's.

    Args:
        sheet: The golden.
        case: Its test case as it is now; None where there is none.
        rows: Those that read the golden.
        commits: Of the project.
    """
    provenance = _provenance_of(sheet)
    if provenance is None:
        return
    line = sheet.line_of("_provenance")
    commit = provenance.commit
    if commit is not None and commits.lacks(commit):
        message = f"was made at commit {commit}, which the repository does not have; "
        yield sheet.finding("golden-commit", f"{message}record it again", line=line)
    if not rows:
        return
    now = [fingerprint(row, None if case is None else case.value) for row in rows]
    if provenance.config_hash is not None:
        if provenance.config_hash not in now:
            message = f"was made of another case or row: its config_hash is not {now[0]}, that of "
            message += f"{rows[0].where}; record it again"
            yield sheet.finding("golden-stale", message, line=line)
    elif commit is not None and case is not None:
        then = commits.case_at(commit, case.file)
        if then is not None and fingerprint(rows[0], then) != now[0]:
            message = f"was made at commit {commit}, {case.file} has changed since; record it again"
            yield sheet.finding("golden-stale", message, line=line)


def find_copies(sheets: Iterable[GoldenFile]) -> Iterator[RecipeFinding]:
    """Yield the goldens that are equal to an earlier one, times included: those never repeat."""
    first: dict[int, GoldenFile] = {}
    for sheet in sheets:
        metrics, generation = sheet.document.metrics, sheet.document.generation
        if generation is not None and not generation.throughput:
            continue
        if generation is None and "iteration-time" not in metrics:
            continue
        content = [(name, series.steps, series.values) for name, series in metrics.items()]
        other = first.setdefault(hash((tuple(content), repr(generation))), sheet)
        is_equal = (other.document.metrics, other.document.generation) == (metrics, generation)
        if other is not sheet and is_equal:
            message = f"holds the same values as {other.path}, times included: one of them was "
            yield sheet.finding("golden-copy", f"{message}copied, not measured; record it again")


def _provenance_of(sheet: GoldenFile) -> Provenance | None:
    value = sheet.document.provenance
    try:
        return None if value is None else parse_provenance(value, str(sheet.path))
    except GoldenError:
        return None  # what is wrong inside a file is told with the rest of it

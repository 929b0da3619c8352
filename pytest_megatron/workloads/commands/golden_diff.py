"""`pytest-megatron golden diff`: one table of how the goldens of a change differ.

Thin: reads files and commits, asks `workloads/refresh/` and prints.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TypeAlias

import click

from pytest_megatron.base.command import format_option, root_option
from pytest_megatron.base.files import read_bytes
from pytest_megatron.base.project import fix_of_owner, run_git
from pytest_megatron.base.text import printable
from pytest_megatron.errors import GoldenError
from pytest_megatron.workloads.golden.model import Golden
from pytest_megatron.workloads.golden.store import parse_golden
from pytest_megatron.workloads.recipe.case import CASES, GOLDEN_PREFIX, GOLDENS
from pytest_megatron.workloads.refresh.difference import FileChange, FileDifference, differ
from pytest_megatron.workloads.refresh.report import differences_text, markdown

# Of one side of a comparison: name to what messages call the file, and its bytes.
_Side: TypeAlias = Mapping[str, tuple[str, bytes]]
_MOST_REVISIONS = 2
_DEFAULT_PATHS = (GOLDENS.as_posix(), CASES.as_posix())


@click.command("diff")
@click.argument("paths", nargs=-1, metavar="[PATH]...")
@click.option(
    "--rev",
    "revisions",
    multiple=True,
    metavar="COMMIT",
    help="Compare the goldens of a commit with the working tree, or of two commits (A..B).  "
    "[default: HEAD]",
)
@format_option("text", "markdown")
@root_option
def diff(*, paths: tuple[str, ...], revisions: tuple[str, ...], form: str, root: Path) -> None:
    """Print how the goldens of a commit, by default the last one, differ from those that are here.

    PATH limits that to some of the goldens of the project. One row a metric that changes, the
    worst first: the mean relative difference as Megatron-LM's script has it, the largest one, the
    first step that differs, and whether it is another curve or only other digits, within the band
    of the policy strict.
    """
    revisions = tuple(part for one in revisions for part in one.split("..", 1)) or ("HEAD",)
    if len(revisions) > _MOST_REVISIONS or not all(revisions):
        raise GoldenError("--rev", f"found {len(revisions)} commits, expected COMMIT or A..B")
    first, *others = revisions
    wanted = paths or _DEFAULT_PATHS
    old = _side_of_revision(root, first, wanted)
    new = _side_of_revision(root, others[0], wanted) if others else _side_of_tree(root, wanted)
    differences, problems = _compare_sides(old, new)
    for problem in problems:
        click.echo(printable(problem), err=True)
    click.echo(printable((markdown if form == "markdown" else differences_text)(differences)))


def _side_of_tree(root: Path, paths: Sequence[str]) -> _Side:
    """Return the goldens below `paths` in the working tree of `root`, by path.

    Raises:
        GoldenError: One of them cannot be read.
    """
    found: dict[str, tuple[str, bytes]] = {}
    for place in (root / path for path in paths):
        files = [place] if place.is_file() else sorted(place.rglob(f"{GOLDEN_PREFIX}*.json"))
        for file in filter(Path.is_file, files):
            try:
                found[file.relative_to(root).as_posix()] = str(file), read_bytes(file)
            except OSError as error:
                raise GoldenError(str(file), f"cannot be read: {error.strerror}") from error
    return found


def _side_of_revision(root: Path, revision: str, paths: Sequence[str]) -> _Side:
    """Return the goldens below `paths` at a commit, by path.

    Raises:
        GoldenError: git does not know the commit, or `root` is in no repository.
    """
    prefix = _git(root, "rev-parse", "--show-prefix").decode().strip()
    names = _git(root, "ls-tree", "-r", "-z", "--name-only", "--end-of-options", revision, *paths)
    wanted = [name for name in names.decode().split("\0") if name and _is_golden(name)]
    contents = _contents(root, [f"{revision}:{prefix}{name}" for name in wanted])
    return {
        name: (f"{revision}:{name}", content)
        for name, content in zip(wanted, contents, strict=True)
    }


def _compare_sides(old: _Side, new: _Side) -> tuple[tuple[FileDifference, ...], tuple[str, ...]]:
    """Return how goldens differ, file by file, and the problems of those that cannot be read.

    Files whose bytes are the same are not parsed; they count as unchanged.
    """
    found: list[FileDifference] = []
    problems: list[str] = []
    for name in sorted(old.keys() | new.keys()):
        a, b = old.get(name), new.get(name)
        if a is not None and b is not None and a[1] == b[1]:
            found.append(FileDifference(path=name, state=FileChange.UNCHANGED))
            continue
        (before, broken_before), (after, broken_after) = _parse(a), _parse(b)
        problems += [problem for problem in (broken_before, broken_after) if problem]
        if before is not None or after is not None:
            broken = broken_before or broken_after
            found.append(differ(name, before, after, broken=broken))
    return tuple(found), tuple(problems)


def _parse(file: tuple[str, bytes] | None) -> tuple[Golden | None, str]:
    """Return the golden of a file of a side, or why there is none."""
    if file is None:
        return None, ""
    where, content = file
    try:
        return parse_golden(content.decode("utf-8-sig"), where), ""
    except UnicodeDecodeError as error:
        return None, f"{where}: not UTF-8 text, at byte {error.start}"
    except GoldenError as error:
        return None, str(error)


def _is_golden(name: str) -> bool:
    """Return whether a name is that of a golden."""
    path = PurePosixPath(name)
    is_named = path.name.startswith(GOLDEN_PREFIX) and path.suffix == ".json"
    return is_named and "\n" not in name


def _contents(root: Path, objects: Sequence[str]) -> Iterator[bytes]:
    """Yield the content of objects of git, with one process for all of them."""
    answer = _git(root, "cat-file", "--batch", given="\n".join(objects) + "\n") if objects else b""
    at = 0
    for _ in objects:
        end = answer.index(b"\n", at)
        size = int(answer[at:end].rpartition(b" ")[2])
        yield answer[end + 1 : end + 1 + size]
        at = end + 1 + size + 1


def _git(root: Path, *arguments: str, given: str = "") -> bytes:
    """Return what git prints."""
    try:
        done = run_git(root, *arguments, given=given.encode())
    except OSError as error:
        raise GoldenError("git", f"cannot be started: {error.strerror}") from error
    if done.returncode:
        words = done.stderr.decode(errors="replace")
        if (fix := fix_of_owner(words)) is not None:
            raise GoldenError(str(root), f"git refuses it, another user owns it; {fix}")
        said = words.strip().splitlines() or ["it failed"]
        raise GoldenError(
            str(root), f"git says: {said[-1]}; give a commit that `git log` shows here"
        )
    return done.stdout

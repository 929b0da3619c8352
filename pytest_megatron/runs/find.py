"""Finds run directories below paths and in artifacts, and items in them; removes old ones."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath, PurePosixPath

from pytest_megatron.errors import ReproError, RunError, TriageError
from pytest_megatron.runs.archives import is_archive, unpack
from pytest_megatron.runs.layout import RUN_FILE, RUNS_DIR, item_dirs
from pytest_megatron.runs.record import (
    RecordedAttempt,
    RecordedExecution,
    RecordedItem,
    RecordedPlan,
    RecordedTest,
    Result,
    read_if_whole,
    read_record,
    read_run,
)

_MOST_LISTED = 20
_IMAGE = re.compile(r"[A-Za-z0-9/][\w./:@+#-]{0,499}").fullmatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """One execution of one item of a run.

    Attributes:
        run_dir: Where the run lies here.
        attempt: None where nothing was started.
        before: Node ids that its gang ran before it, in that order; empty for a workload.
    """

    run_dir: Path
    run: Result
    node_id: str
    item: RecordedItem
    attempt: RecordedAttempt | RecordedExecution | None
    before: tuple[str, ...]

    @property
    def has_failed(self) -> bool:
        """Whether that execution failed."""
        if self.attempt is not None and self.attempt is not self.item.attempts[-1]:
            return True  # only what failed is run again
        return self.item.verdict in ("failed", "broken")

    @property
    def fingerprint(self) -> str | None:
        """What an equal failure has; None where it is not known."""
        is_last = self.attempt is None or self.attempt is self.item.attempts[-1]
        return self.item.fingerprint if is_last else None

    @property
    def problem(self) -> str:
        """The headline of the failure."""
        cause = self.attempt.cause if isinstance(self.attempt, RecordedAttempt) else None
        return self.item.headline or cause or ""


def read_own_run(run_dir: Path) -> Result:
    """Return the record of a run from which something is to be done again.

    Raises:
        ReproError: A name in it is none that an item or an image has.
        RunError: It cannot be read.
    """
    run, path = read_run(run_dir), run_dir / RUN_FILE
    for node_id in run.items:
        check_node_id(node_id, str(path))
    if run.image is not None and not _IMAGE(run.image):
        raise ReproError(f"{path}: 'image'", f"{run.image!r} is no name of an image; refused")
    return run


def read_own_item(run_dir: Path, node_id: str) -> RecordedItem | None:
    """Return the record of an item; None where the run has none of it."""
    return read_own_run(run_dir).items.get(node_id) if (run_dir / RUN_FILE).is_file() else None


def check_node_id(node_id: str, where: str) -> None:
    """Make sure that a node id names a test below the project, and is no option of pytest's.

    Raises:
        ReproError: It does not.
    """
    file, colons, _ = node_id.partition("::")
    path = PurePosixPath(file)
    is_inside = not path.is_absolute() and ".." not in path.parts
    is_plain = node_id.isprintable() and not node_id.startswith(("-", "@")) and "\\" not in file
    if not (colons and is_inside and is_plain):
        raise ReproError(where, f"{node_id!r} is no node id of a test in the project; refused")


def find_plan(run_dir: Path, node_id: str, repeat: int, attempt: int) -> tuple[Path, RecordedPlan]:
    """Return the plan of an attempt and where it is; its place follows from the node id alone.

    Raises:
        ReproError: It is of another item.
        RunError: It cannot be read.
    """
    path = item_dirs(run_dir, node_id).attempt(repeat=repeat, attempt=attempt).plan
    plan = read_record(path, RecordedPlan)
    if plan.node_id != node_id:
        raise ReproError(str(path), f"is of {plan.node_id!r}, expected {node_id!r}")
    return path, plan


def choose(
    runs: Mapping[Path, Result],
    wanted: str | None,
    *,
    where: str = "PATH",
    attempt: int | None = None,
    repeat: int | None = None,
) -> Chosen:
    """Return what is to be done again.

    Args:
        runs: Run directory -> what it holds.
        wanted: A node id, a name, or a part of one; of several, the one that failed. None takes
            the only item that failed.
        where: What the user gave, for errors.
        attempt: Counted from 1; None takes the last.
        repeat: Repeat of a workload, counted from 1; None takes the last.

    Raises:
        ReproError: Nothing or several fit; the text lists them.
    """
    if wanted is None:
        path, node_id = _only_failure(runs, where)
    else:
        path, node_id = _named(runs, wanted)
    run = runs[path]
    item = run.items[node_id]
    found = _execution(item, node_id, attempt, repeat)
    return Chosen(
        run_dir=path,
        run=run,
        node_id=node_id,
        item=item,
        attempt=found,
        before=_before(run, found) if isinstance(found, RecordedExecution) else (),
    )


def _only_failure(runs: Mapping[Path, Result], where: str) -> tuple[Path, str]:
    """Return the only item that failed; several are an error that names them."""
    items = _items(runs)
    found, what = _worst(runs, items)
    if what is None:
        raise ReproError(where, f"nothing failed in it; name what is to run again:{_list(items)}")
    if len(found) > 1:
        raise ReproError(where, f"{len(found)} items {what}; name one:{_list(found)}")
    return found[0]


def _items(runs: Mapping[Path, Result]) -> list[tuple[Path, str]]:
    return [(path, node_id) for path, run in runs.items() for node_id in run.items]


def _worst(
    runs: Mapping[Path, Result], items: Sequence[tuple[Path, str]]
) -> tuple[Sequence[tuple[Path, str]], str | None]:
    """Return those of `items` that failed, else the flaky ones, with the word for it, else all."""
    for what, verdicts in (("failed", ("failed", "broken")), ("were flaky", ("flaky",))):
        found = [pair for pair in items if runs[pair[0]].items[pair[1]].verdict in verdicts]
        if found:
            return found, what
    return items, None


def _named(runs: Mapping[Path, Result], wanted: str) -> tuple[Path, str]:
    """Return the one item with this node id, name or part of a name."""
    items = _items(runs)
    exact = [pair for pair in items if pair[1] == wanted]
    end = f"::{wanted}"
    named = [pair for pair in items if pair[1].partition("[")[0].endswith(end)]
    named = [pair for pair in items if pair[1].endswith(end)] or named
    found, _ = _worst(runs, exact or named or [pair for pair in items if wanted in pair[1]])
    if len(found) == 1:
        return found[0]
    if exact:
        raise ReproError(wanted, f"ran in {len(exact)} runs; give the path of one:{_paths(exact)}")
    if found:
        raise ReproError(wanted, f"fits {len(found)} items, expected one:{_list(found)}")
    names = [node_id for _, node_id in items]
    close = difflib.get_close_matches(wanted, names, 5, 0.4) or names
    near = [pair for pair in items if pair[1] in close]
    raise ReproError(wanted, f"is no item of the run; nearest:{_list(near)}")


def _execution(
    item: RecordedItem, node_id: str, attempt: int | None, repeat: int | None
) -> RecordedAttempt | RecordedExecution | None:
    """Return the attempt that the options choose, by default the last."""
    found: Sequence[RecordedAttempt | RecordedExecution]
    if isinstance(item, RecordedTest):
        if repeat is not None:
            raise ReproError("--repeat", f"{node_id} is a test, which has no repeats; drop it")
        names = [f"attempt {number}" for number in range(1, len(item.attempts) + 1)]
        found = item.attempts if attempt is None else item.attempts[attempt - 1 : attempt]
    else:
        names = [f"repeat {a.repeat} attempt {a.attempt}" for a in item.attempts]
        found = [
            a
            for a in item.attempts
            if (repeat is None or a.repeat == repeat) and (attempt is None or a.attempt == attempt)
        ]
    if not found and (attempt is not None or repeat is not None):
        there = ", ".join(names)
        raise ReproError("--attempt", f"{node_id} has no such attempt, expected {there or 'none'}")
    return found[-1] if found else None


def _before(run: Result, found: RecordedExecution) -> tuple[str, ...]:
    """Return what the same gang ran earlier, by the places in which executions began."""
    if found.run is None:
        return ()
    earlier = {
        execution.run: node_id
        for node_id, item in run.items.items()
        if isinstance(item, RecordedTest)
        for execution in item.attempts
        if execution.directory == found.directory
        and execution.run is not None
        and execution.run < found.run
    }
    return tuple(dict.fromkeys(node_id for _, node_id in sorted(earlier.items())))


def _list(found: Sequence[tuple[Path, str]]) -> str:
    """Return node ids as lines, and how many more there are."""
    lines = [f"\n  {node_id}" for _, node_id in found[:_MOST_LISTED]]
    left = len(found) - _MOST_LISTED
    return "".join(lines) + (f"\n  and {left} more" if left > 0 else "")


def _paths(found: Sequence[tuple[Path, str]]) -> str:
    return "".join(f"\n  {path}" for path, _ in found[:_MOST_LISTED])


SUMMARY_FILE = "summary.json"
_SKIPPED = frozenset(("checkpoints", "data_cache"))
_DEEPEST = 8


def runs_below(
    root: Path, *, depth: int = _DEEPEST, skipped: Collection[str] = _SKIPPED
) -> Iterator[Path]:
    """Return the run directories at or below `root`, in order of their paths.

    Args:
        root: A directory.
        depth: The number of levels below `root` to search.
        skipped: Names of directories that hold none.
    """
    found = directories_below(root, depth=depth, skipped=skipped)
    return (directory for directory in found if (directory / RUN_FILE).is_file())


def directories_below(root: Path, *, depth: int, skipped: Collection[str]) -> Iterator[Path]:
    """Yield a directory and those below it, in order of their paths.

    Follows no link, enters no run, and passes over what it may not read.

    Args:
        root: A directory.
        depth: The number of levels below `root` to search.
        skipped: Names of directories to pass over.
    """
    for directory, names, _ in os.walk(root):
        here = Path(directory)
        is_run = (here / RUN_FILE).is_file()
        is_end = is_run or len(here.relative_to(root).parts) >= depth
        names[:] = [] if is_end else sorted(name for name in names if name not in skipped)
        yield here


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundRun:
    """A run directory in something that was named.

    Attributes:
        name: For a person; of an artifact its own, and the place in it.
        is_unpacked: Whether it lies in the scratch directory.
    """

    directory: Path
    name: str
    is_unpacked: bool = False


@dataclass(frozen=True, slots=True)
class _RunFinder:
    """Finds runs at a path.

    Attributes:
        is_wanted: Which members of an artifact are unpacked beside `run.json`.
        looks_up: Whether a path may lie in a run.
        refused: Collects the errors of artifacts that cannot be unpacked; None raises the first.
    """

    is_wanted: Callable[[PurePath], bool]
    looks_up: bool
    refused: list[RunError] | None

    def find(self, path: Path, scratch: Path) -> Iterator[FoundRun]:
        """Yield the runs in a path: a run, an archive, a summary, or a folder."""
        if path.is_file() and is_archive(path):
            yield from self._unpacked(path, scratch)
        elif self.looks_up and (above := _above(path)) is not None:
            yield _here(above)
        elif (summary := _summary_at(path)) is not None:
            for number, artifact in enumerate(_named_by(summary)):
                yield from self.find(artifact, scratch / str(number))
        elif path.is_dir():
            runs = [_here(directory) for directory in runs_below(path)]
            yield from runs
            archives = () if runs else sorted(filter(is_archive, path.rglob("*")))
            for number, archive in enumerate(archives):
                yield from self._unpacked(archive, scratch / str(number))

    def _unpacked(self, archive: Path, scratch: Path) -> Iterator[FoundRun]:
        """Yield the runs in an archive, whose records are unpacked."""
        target = scratch / "artifact"
        target.mkdir(parents=True)
        try:
            unpack(archive, target, lambda name: name.name == RUN_FILE or self.is_wanted(name))
        except TriageError as error:
            refused = RunError(error.where, error.problem)
            if self.refused is None:
                raise refused from None
            self.refused.append(refused)
            return
        name = archive.name.split(".")[0]
        for directory in runs_below(target):
            below = directory.relative_to(target).as_posix()
            shown = name if below == "." else f"{name}/{below}"
            yield FoundRun(directory=directory, name=shown, is_unpacked=True)


def find_runs(
    paths: Sequence[Path],
    scratch: Path,
    is_wanted: Callable[[PurePath], bool],
    *,
    looks_up: bool = False,
    refused: list[RunError] | None = None,
) -> list[FoundRun]:
    """Return the runs in some paths, in that order.

    Args:
        paths: Each a run directory; an artifact; a directory with several of either; the
            output of `pytest-megatron ci summary`.
        scratch: A directory for the files of artifacts; made where one has to be unpacked.
        is_wanted: Which members of an artifact are unpacked beside `run.json`.
        looks_up: Whether a path may also be of anything in a run.
        refused: Gets the error of each artifact that is refused, instead of raising it.

    Raises:
        RunError: A path is not there or holds no run, or an artifact is refused.
    """
    finder = _RunFinder(is_wanted, looks_up, refused)
    found: list[FoundRun] = []
    for number, path in enumerate(paths):
        if not path.exists():
            raise RunError(
                str(path), "is not there, expected a run directory or an artifact of one"
            )
        num_refused = len(refused or ())
        mine = list(finder.find(path, scratch / str(number)))
        if not mine and len(refused or ()) == num_refused:
            is_read = path.is_dir() or is_archive(path)
            what = f"holds no {RUN_FILE}" if is_read else "is no directory and no archive"
            raise RunError(str(path), f"{what}, expected a run directory, or a zip or tar of one")
        found += mine
    return found


def _here(directory: Path) -> FoundRun:
    return FoundRun(directory=directory, name=directory.resolve().name)


@dataclass(frozen=True, kw_only=True)
class _SummaryJob:
    """A job in a summary."""

    artifact: str | None = None


@dataclass(frozen=True, kw_only=True)
class _SummaryFile:
    """The keys of a summary that name places of runs."""

    jobs: tuple[_SummaryJob, ...]


def _summary_at(path: Path) -> Path | None:
    """Return the summary that a path is, or is the directory of."""
    file = path / SUMMARY_FILE if path.is_dir() else path
    return file if file.name == SUMMARY_FILE and file.is_file() else None


def _named_by(summary: Path) -> list[Path]:
    """Return the artifacts that a `summary.json` names.

    Raises:
        RunError: It is none, or none of its artifacts is here.
    """
    jobs = read_record(summary, _SummaryFile).jobs
    names = [job.artifact.partition("!")[0] for job in jobs if job.artifact]
    bases = (Path(), summary.parent, summary.parent.parent)
    found = [next((b / name for b in bases if (b / name).exists()), None) for name in names]
    artifacts = list(dict.fromkeys(path for path in found if path is not None))
    if not artifacts:
        listed = ", ".join(names[:5]) or "none"
        raise RunError(
            str(summary), f"names artifacts that are not here: {listed}; give the path of one"
        )
    return artifacts


def _above(path: Path) -> Path | None:
    """Return the run that a path is the directory of, or lies in."""
    for directory in (path, *path.resolve().parents)[:_DEEPEST]:
        if (directory / RUN_FILE).is_file():
            return directory
    return None


_NAME = re.compile(r"\d{8}-\d{6}-[0-9a-f]+").fullmatch  # in the order in which runs began


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptRun:
    """A run in our own directory.

    Attributes:
        exit_code: Exit code of pytest; None of a run that has not ended, or that was killed.
    """

    directory: Path
    exit_code: int | None
    num_items: int


def kept_runs(root: Path) -> tuple[KeptRun, ...]:
    """Return the runs that a project keeps in our own directory, the latest first."""
    found = sorted((root / RUNS_DIR).glob("*/" + RUN_FILE), reverse=True)
    places = [file.parent for file in found]
    return tuple(_kept(path) for path in places if _NAME(path.name) and not path.is_symlink())


def remove_old_runs(root: Path, keep: int, *, spared: Path | None = None) -> tuple[Path, ...]:
    """Remove the runs in our own directory that have ended, but for the latest `keep`.

    A run that has not ended may be going on, or be taken over, and stays; it counts.

    Args:
        root: The project's.
        keep: At least 1.
        spared: A run that stays whichever it is.

    Raises:
        OSError: One cannot be removed.
    """
    removed: list[Path] = []
    for run in kept_runs(root)[keep:]:
        is_spared = spared is not None and run.directory.resolve() == spared.resolve()
        if run.exit_code is None or is_spared:
            continue
        # First another name: what is half removed must not be taken for a run.
        doomed = run.directory.with_name(f".removed-{run.directory.name}")
        with contextlib.suppress(FileNotFoundError):  # another session was faster
            run.directory.replace(doomed)
            shutil.rmtree(doomed)
            removed.append(run.directory)
    return tuple(removed)


def _kept(directory: Path) -> KeptRun:
    run = read_if_whole(directory / RUN_FILE, Result) or Result(items={})
    return KeptRun(directory=directory, exit_code=run.exit_code, num_items=len(run.items))

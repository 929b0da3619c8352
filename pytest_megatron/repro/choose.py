"""Finds the item of a run that is to run again, and its plan."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from pytest_megatron.errors import ReproError
from pytest_megatron.runs.layout import RUN_FILE, item_dirs
from pytest_megatron.runs.record import (
    RecordedAttempt,
    RecordedExecution,
    RecordedItem,
    RecordedPlan,
    RecordedTest,
    Result,
    read_record,
    read_run,
)

_MOST_LISTED = 20


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
        ReproError: A name in it is none that an item has.
        RunError: It cannot be read.
    """
    run, path = read_run(run_dir), run_dir / RUN_FILE
    for node_id in run.items:
        check_node_id(node_id, str(path))
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

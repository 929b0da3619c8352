"""Which item of a run is meant, which execution of it, and what ran before it. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_megatron.errors import ReproError
from pytest_megatron.runs.record import RecordedAttempt, RecordedItem, RecordedRun

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
    run: RecordedRun
    node_id: str
    item: RecordedItem
    attempt: RecordedAttempt | None
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
        """The first line of why it failed."""
        told = self.attempt.cause if self.attempt is not None else None
        return headline(self.node_id, self.item.problem or told)


def headline(node_id: str, problem: str | None) -> str:
    """Return the first line of a failure, without what its reader knows: item and log file."""
    first = (problem or "").partition("\n")[0].removeprefix(f"{node_id}: ")
    return first.partition("; see ")[0]


def choose(
    runs: Mapping[Path, RecordedRun],
    wanted: str | None,
    *,
    where: str = "PATH",
    attempt: int | None = None,
    repeat: int | None = None,
) -> Chosen:
    """Return what is to be done again.

    Args:
        runs: Run directory -> what it holds.
        wanted: A node id, or a part of just one; None takes the only item that failed.
        where: What the user gave, for errors.
        attempt: Counted from 1; None takes the last.
        repeat: Of a workload, likewise.

    Raises:
        ReproError: Nothing or several fit; the text lists them.
    """
    items = [(path, node_id) for path, run in runs.items() for node_id in run.items]
    if wanted is None:
        path, node_id = _only_failure(runs, where)
    else:
        path, node_id = _named(items, wanted)
    run = runs[path]
    item = run.items[node_id]
    found = _execution(item, node_id, attempt, repeat)
    return Chosen(
        run_dir=path,
        run=run,
        node_id=node_id,
        item=item,
        attempt=found,
        before=() if item.is_workload or found is None else _before(run, found),
    )


def _only_failure(runs: Mapping[Path, RecordedRun], where: str) -> tuple[Path, str]:
    for verdicts in (("failed", "broken"), ("flaky",)):
        found = [
            (path, node_id)
            for path, run in runs.items()
            for node_id, item in run.items.items()
            if item.verdict in verdicts
        ]
        if len(found) == 1:
            return found[0]
        if found:
            raise ReproError(
                where, f"{len(found)} items {_SAID[verdicts[0]]}; name one:{_list(found)}"
            )
    items = [(path, node_id) for path, run in runs.items() for node_id in run.items]
    raise ReproError(where, f"nothing failed in it; name what is to run again:{_list(items)}")


_SAID = {"failed": "failed", "flaky": "were flaky"}


def _named(items: Sequence[tuple[Path, str]], wanted: str) -> tuple[Path, str]:
    exact = [found for found in items if found[1] == wanted]
    found = exact or [found for found in items if wanted in found[1]]
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
) -> RecordedAttempt | None:
    if not item.is_workload:
        if repeat is not None:
            raise ReproError("--repeat", f"{node_id} is a test, which has no repeats; drop it")
        found = list(item.attempts)
        if attempt is not None:
            found = found[attempt - 1 : attempt]
    else:
        found = [
            a
            for a in item.attempts
            if (repeat is None or a.repeat == repeat) and (attempt is None or a.attempt == attempt)
        ]
    if not found and (attempt is not None or repeat is not None):
        there = ", ".join(
            f"repeat {a.repeat} attempt {a.attempt}" if a.repeat else f"attempt {number}"
            for number, a in enumerate(item.attempts, start=1)
        )
        raise ReproError("--attempt", f"{node_id} has no such attempt, expected {there or 'none'}")
    return found[-1] if found else None


def _before(run: RecordedRun, found: RecordedAttempt) -> tuple[str, ...]:
    """Return what the same gang ran earlier, by the places in which executions began."""
    if found.run is None:
        return ()
    earlier = {
        execution.run: node_id
        for node_id, item in run.items.items()
        for execution in item.attempts
        if execution.directory == found.directory
        and execution.run is not None
        and execution.run < found.run
    }
    return tuple(dict.fromkeys(node_id for _, node_id in sorted(earlier.items())))


def _list(found: Sequence[tuple[Path, str]]) -> str:
    lines = [f"\n  {node_id}" for _, node_id in found[:_MOST_LISTED]]
    left = len(found) - _MOST_LISTED
    return "".join(lines) + (f"\n  and {left} more" if left > 0 else "")


def _paths(found: Sequence[tuple[Path, str]]) -> str:
    return "".join(f"\n  {path}" for path, _ in found[:_MOST_LISTED])

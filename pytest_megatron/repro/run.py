"""Runs pytest once more and reads what it left (effects: processes, files).

Finds as well which of the tests before an item its failure takes.
"""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from pytest_megatron.errors import ReproError
from pytest_megatron.runs.choose import Chosen, read_own_item
from pytest_megatron.runs.record import RecordedAttempt, RecordedItem
from pytest_megatron.session.again import (
    PYTEST_EXITS,
    Again,
    Wishes,
    command_for,
    environment_with,
)


class ReproExit(IntEnum):
    """Exit codes of `pytest-megatron repro`."""

    PASSED = 0
    SAME = 1
    OTHER = 3
    UNKNOWN = 125  # also OTHER, while git bisects: another failure says nothing about this one
    INTERRUPTED = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class ReproOutcome:
    """What came of it.

    Attributes:
        text: In a line or two.
    """

    exit: ReproExit
    text: str


def judge_again(chosen: Chosen, again: RecordedItem | None, returncode: int) -> ReproOutcome:
    """Compare an item that ran again with what it was.

    Args:
        chosen: What it was.
        again: The record of it now; None where it did not run.
        returncode: Return code of pytest.
    """
    if again is None or again.verdict == "skipped":
        did_not = PYTEST_EXITS.get(returncode, "it did not run")
        why = did_not if again is None else "it was skipped"
        return ReproOutcome(
            exit=ReproExit.UNKNOWN, text=f"cannot tell: {why} (pytest ended with {returncode})"
        )
    if again.verdict in ("passed", "flaky"):
        return ReproOutcome(exit=ReproExit.PASSED, text="passes here")
    told = again.headline
    if not chosen.has_failed:
        return ReproOutcome(exit=ReproExit.OTHER, text=f"fails here, and did not there: {told}")
    if is_same_failure(chosen, again):
        return ReproOutcome(exit=ReproExit.SAME, text=f"fails in the same way: {told}")
    if again.verdict == "broken" and chosen.item.verdict != "broken":
        return ReproOutcome(
            exit=ReproExit.UNKNOWN, text=f"cannot tell: it could not run here: {told}"
        )
    return ReproOutcome(
        exit=ReproExit.OTHER,
        text=f"fails in another way\n  there: {chosen.problem}\n  here:  {told}",
    )


def is_same_failure(chosen: Chosen, again: RecordedItem) -> bool:
    """Whether two failures of an item have the same fingerprint, of the best that is known."""
    if chosen.fingerprint is not None and again.fingerprint is not None:
        return chosen.fingerprint == again.fingerprint
    there, here = chosen.attempt, again.attempts[-1] if again.attempts else None
    if there is None or here is None:
        return chosen.problem == again.headline
    if isinstance(there, RecordedAttempt) and isinstance(here, RecordedAttempt):
        known = there.fingerprint, here.fingerprint
        if None not in known:
            return known[0] == known[1]
    return there.signature == here.signature


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Where items are done again.

    Attributes:
        root: The project; pytest runs in it.
        scratch: Directory of this reproduction: what was unpacked, and new run directories.
    """

    root: Path
    scratch: Path

    def command(
        self, chosen: Chosen, wishes: Wishes, before: Sequence[str], name: str = "run"
    ) -> Again:
        """Return the command whose results go to a directory of that name."""
        target = self.scratch / name
        inside = target.is_relative_to(self.root)
        return command_for(
            chosen,
            wishes,
            before,
            run_dir=str(target.relative_to(self.root) if inside else target),
        )

    def run(
        self, chosen: Chosen, again: Again, name: str = "run", *, is_quiet: bool
    ) -> ReproOutcome:
        """Run the command to its end and judge what it left.

        Args:
            chosen: The item.
            again: From `command`, with the same `name`.
            name: Name of the directory for results.
            is_quiet: Whether what pytest prints goes into a file beside that directory.

        Raises:
            KeyboardInterrupt: Ctrl-C, once pytest has ended its processes.
            ReproError: pytest cannot be started.
        """
        log = self.scratch / f"{name}.log"
        self.scratch.mkdir(parents=True, exist_ok=True)
        try:
            with log.open("wb") if is_quiet else open(os.devnull, "wb") as file:  # noqa: PTH123
                process = subprocess.Popen(
                    again.argv,
                    cwd=self.root,
                    env=environment_with(again.env),
                    stdout=file if is_quiet else None,
                    stderr=subprocess.STDOUT if is_quiet else None,
                )
        except OSError as error:
            raise ReproError(again.argv[0], f"cannot be started: {error.strerror}") from error
        try:
            returncode = process.wait()
        except KeyboardInterrupt:  # pytest has it too, and needs a moment to end its ranks
            process.wait()
            raise
        return judge_again(chosen, read_own_item(self.scratch / name, chosen.node_id), returncode)


def smallest_cause(
    tests: Sequence[str], is_cause: Callable[[Sequence[str]], bool]
) -> tuple[str, ...]:
    """Return a part of `tests`, in their order, of which none can be left out.

    Source: Zeller and Hildebrandt, Simplifying and Isolating Failure-Inducing Input, 2002 (ddmin).

    Args:
        tests: In the order in which they ran; together they are a cause.
        is_cause: Runs these and returns whether the failure is there. Called once for each part.
    """
    known: dict[tuple[str, ...], bool] = {}

    def holds(part: Sequence[str]) -> bool:
        """Return whether the item fails after these tests; each trial runs once."""
        key = tuple(part)
        if key not in known:
            known[key] = is_cause(key)
        return known[key]

    current, num_parts = list(tests), 2
    while len(current) > 1:
        parts = _split(current, num_parts)
        smaller = next((part for part in reversed(parts) if holds(part)), None)
        if smaller is not None:
            current, num_parts = smaller, 2
            continue
        rests = [[t for p in parts if p is not part for t in p] for part in parts]
        smaller = next((rest for rest in rests if num_parts > 2 and holds(rest)), None)  # noqa: PLR2004 - of two, the rest is the other part
        if smaller is not None:
            current, num_parts = smaller, max(num_parts - 1, 2)
        elif num_parts >= len(current):
            break
        else:
            num_parts = min(num_parts * 2, len(current))
    return tuple(current)


def _split(tests: Sequence[str], num_parts: int) -> list[list[str]]:
    """Return `tests` in parts of nearly equal length."""
    bounds = [len(tests) * number // num_parts for number in range(num_parts + 1)]
    return [list(tests[a:b]) for a, b in itertools.pairwise(bounds)]

"""Tests that ran nowhere: at no world size of a run, or in no job. Pure.

A run records the tests that it deselected as few node ids: that of a file, a class or a function
stands for all tests below it, where none of them was selected and all have one reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from pytest_megatron.base.text import counted, listed, numbered_parameter

Deselected: TypeAlias = Mapping[str, Mapping[str, int]]  # reason -> node id -> tests below it
_SIZE = numbered_parameter("world")


@dataclass(frozen=True, slots=True, kw_only=True)
class NowhereGroup:
    """Tests that ran nowhere for one reason.

    Attributes:
        tests: Node id of a test, a function, a class or a file -> number of tests that it stands
            for; 0 for a file that was not collected.
    """

    reason: str
    tests: Mapping[str, int]

    @property
    def amount(self) -> str:
        """The number of tests and files, such as `3 tests, 1 file`."""
        num_tests = sum(self.tests.values())
        num_files = sum(not number for number in self.tests.values())
        parts = ((num_tests, "test"), (num_files, "file"))
        return ", ".join(counted(number, what) for number, what in parts if number)

    def names(self, most: int) -> str:
        """Return at most so many node ids, with their numbers of tests."""
        tests = self.tests.items()
        return listed([f"{test} ({n} tests)" if n > 1 else test for test, n in tests], most)


def fold_deselected(
    deselected: Sequence[tuple[str, str]], kept: Iterable[str], ignored: Mapping[str, str]
) -> Deselected:
    """Return the tests that one run deselected at every world size, by reason.

    Args:
        deselected: Node ids, each with its reason.
        kept: Node ids that were selected.
        ignored: Files that were not collected -> reason.
    """
    reasons: dict[str, str | None] = {}  # None: not all tests below it, or for several reasons
    for level in (level for node_id in kept for level in _levels(node_id)):
        reasons[level] = None
    tests = {_SIZE.sub("", node_id): reason for node_id, reason in deselected}
    for test, reason in tests.items():
        for level in _levels(test):
            if reasons.setdefault(level, reason) != reason:
                reasons[level] = None
    counts: Counter[tuple[str, str]] = Counter()
    for test, reason in tests.items():
        shared = next((level for level in _levels(test) if reasons[level] is not None), None)
        if shared is not None:
            counts[reason, shared] += 1
    found: dict[str, dict[str, int]] = {}
    for (reason, level), number in counts.items():
        found.setdefault(reason, {})[level] = number
    for file, reason in ignored.items():
        found.setdefault(reason, {})[file] = 0
    return found


def ran_nowhere(
    tests: Iterable[tuple[str, str | None]], deselected: Iterable[Deselected] = ()
) -> tuple[NowhereGroup, ...]:
    """Return the tests that were skipped or deselected wherever they could run.

    Args:
        tests: Node id, of any world size, and the reason why it was skipped, None if it ran.
        deselected: Tests that each run left out. Of a file that another run collected, only what
            that one skipped or deselected counts.
    """
    reasons: dict[str, tuple[str, int]] = {}
    divided: set[str] = set()  # node ids with known parts
    for node_id, reason in tests:
        *above, test = _levels(node_id)
        divided.update(above)
        if reason is None:
            divided.add(test)
        else:
            reasons.setdefault(test, (reason, 1))
    for run in deselected:
        for reason, node_ids in run.items():
            for node_id, number in node_ids.items():
                *above, test = _levels(node_id)
                divided.update(above)
                if number > reasons.get(test, ("", -1))[1]:
                    reasons[test] = reason, number
    found: dict[str, dict[str, int]] = {}
    for test, (reason, number) in reasons.items():
        if test not in divided:
            found.setdefault(reason, {})[test] = number
    groups = [NowhereGroup(reason=reason, tests=rows) for reason, rows in found.items()]
    return tuple(sorted(groups, key=lambda group: -sum(max(n, 1) for n in group.tests.values())))


def _levels(node_id: str) -> Iterator[str]:
    """Yield the node ids of a test's file, classes and function, then its own, without sizes."""
    path, bracket, parameters = _SIZE.sub("", node_id).partition("[")
    parts = path.split("::")
    for end in range(1, len(parts) + 1):
        yield "::".join(parts[:end])
    if bracket:
        yield path + bracket + parameters

"""Comparison of the tests that a rank and the controller collected: pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

SKIPPED = "skipped "  # prefix of the problem of a collector that skipped
_NO_SUCH_TEST = "collected no such test"


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectionDifference:
    """Difference between the tests of a rank and those of the controller.

    Attributes:
        missing: Node id -> reason why the rank lacks the test, in one line.
        failures: Node id of a collector -> its error, if tests are missing because of it;
            one that skipped did not fail.
        extra: Node ids that the controller does not have.
    """

    missing: Mapping[str, str] = field(default_factory=dict)
    failures: Mapping[str, str] = field(default_factory=dict)
    extra: tuple[str, ...] = ()

    def is_total(self, num_tests: int) -> bool:
        """Return whether the rank lacks all tests of a session, without a reason for any."""
        return 1 < num_tests == len(self.missing) and {*self.missing.values()} == {_NO_SUCH_TEST}


def digest_of(node_ids: Iterable[str]) -> str:
    """Return a digest of node ids that is independent of their order."""
    return hashlib.sha256("\n".join(sorted(node_ids)).encode()).hexdigest()


def compare(
    known: Iterable[str], found: Iterable[str], problems: Mapping[str, str]
) -> CollectionDifference:
    """Compare the tests of a rank with those of the controller.

    Args:
        known: Node ids of the controller, in order.
        found: Node ids of the rank, in order.
        problems: Node id of a collector of the rank -> reason why it could not be collected.
    """
    known, found = list(known), list(found)
    has, wanted = set(found), set(known)
    causes = {node_id: _cause(node_id, problems) for node_id in known if node_id not in has}
    failed = [c for c in dict.fromkeys(causes.values()) if c is not None]
    return CollectionDifference(
        missing={node_id: _why(cause, problems) for node_id, cause in causes.items()},
        failures={c: problems[c] for c in failed if not problems[c].startswith(SKIPPED)},
        extra=tuple(dict.fromkeys(node_id for node_id in found if node_id not in wanted)),
    )


def last_line(problem: str) -> str:
    """Return the last line of a problem, which may follow a traceback."""
    return problem.rstrip().rpartition("\n")[2]


def _why(cause: str | None, problems: Mapping[str, str]) -> str:
    return _NO_SUCH_TEST if cause is None else last_line(problems[cause])


def _cause(node_id: str, problems: Mapping[str, str]) -> str | None:
    """Return the innermost collector with a problem that a test is below, or None."""
    above = [
        c for c in problems if not c or node_id == c or node_id.startswith((f"{c}::", f"{c}/"))
    ]
    return max(above, key=len) if above else None

"""Whether a rank collected what the controller did, and what to say where it did not: pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """What a rank collected otherwise.

    Attributes:
        missing: Node id -> why the rank has no such test.
        extra: Node ids that the controller does not have.
    """

    missing: Mapping[str, str] = field(default_factory=dict)
    extra: tuple[str, ...] = ()


def digest_of(node_ids: Iterable[str]) -> str:
    """Return a text that is the same for the same node ids, in whatever order."""
    return hashlib.sha256("\n".join(sorted(node_ids)).encode()).hexdigest()


def compare(known: Iterable[str], found: Iterable[str], problems: Mapping[str, str]) -> Difference:
    """Compare what a rank found with what the controller knows.

    Args:
        known: Node ids of the controller, in order.
        found: Node ids of the rank, in order.
        problems: Node id of a collector of the rank -> why it could not be collected.
    """
    known, found = list(known), list(found)
    has, wanted = set(found), set(known)
    return Difference(
        missing={node_id: _why(node_id, problems) for node_id in known if node_id not in has},
        extra=tuple(dict.fromkeys(node_id for node_id in found if node_id not in wanted)),
    )


def _why(node_id: str, problems: Mapping[str, str]) -> str:
    """Return the problem of the innermost collector that a test is below."""
    above = [
        c for c in problems if not c or node_id == c or node_id.startswith((f"{c}::", f"{c}/"))
    ]
    return problems[max(above, key=len)] if above else "collected no such test"

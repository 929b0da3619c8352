"""Looks up loose lines in the one table of signatures, which is data: `triage/signatures.toml`."""

from __future__ import annotations

import re
from collections.abc import Iterable

from pytest_megatron.triage.signature import LineRole, Signature, Table, builtin_table, match_line

__all__ = ["SIGNATURES", "Signature", "is_exception", "is_named", "is_raised", "match_signature"]

_EXCEPTION = re.compile(
    r"(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:Error|Exception|error|Timeout)\b(?::|$)"
)
SIGNATURES: tuple[Signature, ...] = builtin_table().signatures
_NAMELESS = frozenset({"exception", "exit_code", "silent_exit", "terminated", "unknown", "usage"})


def is_named(signature: Signature) -> bool:
    """Whether a row says more than that something failed."""
    return signature.id not in _NAMELESS


def is_exception(line: str) -> bool:
    """Whether a line of a traceback or a log names an exception."""
    return _EXCEPTION.match(line.strip()) is not None


def is_raised(line: str, table: Table | None = None) -> bool:
    """Whether a line of a log is an exception, or one that a row looks for in every line."""
    return is_exception(line) or (match_line(table or builtin_table(), line.strip()) is not None)


def match_signature(lines: Iterable[str], table: Table | None = None) -> Signature | None:
    """Return the row that some line matches; genuine causes come first.

    For lines of which nothing is known. Whoever has the logs asks `triage`, which knows what ended
    a rank and what only stands there.
    """
    table = table or builtin_table()
    found = [row for line in lines if (row := table.raised(line.strip())) is not None]
    causes = [row for row in found if row.role is LineRole.CAUSE and is_named(row)]
    genuine = (row for row in causes if not row.is_transient)
    return next(genuine, causes[0] if causes else None)

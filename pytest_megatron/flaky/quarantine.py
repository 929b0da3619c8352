"""Quarantine in the project's settings: patterns of node ids."""

from __future__ import annotations

import json
import re

from pytest_megatron.base.project import (
    ProjectConfig,
    Quarantine,
    QuarantineError,
    parse_quarantine,
)
from pytest_megatron.errors import ConfigError

_LEAST_LETTERS = 3  # of a pattern, beside * and signs
TABLE = "quarantine"


def project_quarantines(project: ProjectConfig) -> dict[str, Quarantine]:
    """Return `[tool.pytest-megatron.quarantine]`: pattern of node ids -> quarantine.

    Raises:
        ConfigError: An entry is wrong; names file and pattern.
    """
    table = project.tables.get(TABLE, {})
    assert isinstance(table, dict)
    found: dict[str, Quarantine] = {}
    for pattern, given in table.items():
        where = f"{project.file}: [tool.pytest-megatron.{TABLE}] {pattern!r}"
        try:
            found[pattern] = parse_quarantine(given)
        except QuarantineError as problem:
            raise ConfigError(where, str(problem)) from None
        if sum(char.isalnum() for char in pattern) < _LEAST_LETTERS:
            what = "names every item, expected the node id of one, or of a few with *"
            raise ConfigError(where, what)
    return found


def matches(pattern: str, node_id: str) -> bool:
    """Return whether a pattern names an item: `*` is any text, everything else is itself.

    Brackets mean nothing, unlike in a shell: they stand in nearly every node id.
    """
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), node_id) is not None


def table_line(name: str, quarantine: Quarantine) -> str:
    """Return the line of `[tool.pytest-megatron.quarantine]` for an item."""
    key, reason = (
        json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
        for text in (name, quarantine.reason)
    )
    return f"{key} = {{ reason = {reason}, until = {quarantine.until} }}"

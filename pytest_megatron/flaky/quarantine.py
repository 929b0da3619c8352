"""Quarantine in the project's settings: patterns of node ids."""

from __future__ import annotations

import json
import re
from pathlib import Path

from pytest_megatron.base.project import (
    ProjectConfig,
    Quarantine,
    QuarantineError,
    parse_quarantine,
)
from pytest_megatron.errors import ConfigError

_LEAST_LETTERS = 3  # of a pattern, beside * and signs
TABLE = "quarantine"


def check_pattern(pattern: str, root: Path) -> None:
    """Make sure that a pattern of node ids names something of a project, and not everything.

    Raises:
        QuarantineError: It does not.
    """
    if sum(char.isalnum() for char in pattern) < _LEAST_LETTERS:
        raise QuarantineError("names every item, expected the node id of one, or of a few with *")
    file = pattern.partition("::")[0]
    if "**" in file or "[" in file:
        return
    found = root.glob(file) if "*" in file else (path for path in (root / file,) if path.exists())
    if not file.startswith(("*", "/")) and next(iter(found), None) is None:
        raise QuarantineError(f"names no file of the project, {file!r} is not there; correct it")


def project_quarantines(project: ProjectConfig, root: Path) -> dict[str, Quarantine]:
    """Return `[tool.pytest-megatron.quarantine]`: pattern of node ids -> quarantine.

    Raises:
        ConfigError: An entry is wrong; names file and pattern.
    """
    table = project.tables.get(TABLE, {})
    assert isinstance(table, dict)
    found: dict[str, Quarantine] = {}
    for pattern, given in table.items():
        try:
            found[pattern] = parse_quarantine(given)
            check_pattern(pattern, root)
        except QuarantineError as problem:
            where = f"{project.file}: [tool.pytest-megatron.{TABLE}] {pattern!r}"
            raise ConfigError(where, str(problem)) from None
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

"""Quarantine in the project's settings: patterns of node ids, and who owns their files."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Collection, Mapping
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
_HEADER = re.compile(r"\[\s*tool\s*\.\s*pytest-megatron\s*\.\s*quarantine\s*\]\s*(?:#.*)?")


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


def edit_table(text: str, *, added: Mapping[str, Quarantine], removed: Collection[str]) -> str:
    """Return a `pyproject.toml` with other patterns in `[tool.pytest-megatron.quarantine]`.

    Everything else stays as it is, comments included.

    Raises:
        QuarantineError: The table is not written with one line for each pattern.
    """
    lines = re.findall(r"[^\n]*\n|[^\n]+", text)
    end_of_line = "\r\n" if "\r\n" in text else "\n"
    start = next((n for n, line in enumerate(lines) if _HEADER.fullmatch(line.strip())), None)
    if start is None:
        if lines and not lines[-1].endswith("\n"):
            lines[-1] += end_of_line
        lines += [end_of_line] if lines else []
        lines.append(f"[tool.pytest-megatron.{TABLE}]{end_of_line}")
        start = len(lines) - 1
    later = (n for n in range(start + 1, len(lines)) if lines[n].lstrip().startswith("["))
    end = next(later, len(lines))
    body = [line for line in lines[start + 1 : end] if _key_of(line) not in removed]
    last = max((n + 1 for n, line in enumerate(body) if line.strip()), default=0)
    if last and not body[last - 1].endswith("\n"):
        body[last - 1] += end_of_line
    body[last:last] = [_row(name, one) + end_of_line for name, one in added.items()]
    changed = "".join([*lines[: start + 1], *body, *lines[end:]])
    if not _is_edited(text, changed, added, removed):
        raise QuarantineError(
            f"[tool.pytest-megatron.{TABLE}] is not written with a line for each pattern, so that "
            f"it cannot be changed; correct it by hand"
        )
    return changed


def _key_of(line: str) -> str | None:
    """Return the key of a line of a table; None where it is something else."""
    try:
        found = tomllib.loads(line)
    except tomllib.TOMLDecodeError:
        return None
    return next(iter(found), None) if len(found) == 1 else None


def _row(name: str, quarantine: Quarantine) -> str:
    """Return a quarantine as a line of TOML."""
    key, reason = (
        json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
        for text in (name, quarantine.reason)
    )
    return f"{key} = {{ reason = {reason}, until = {quarantine.until} }}"


def _is_edited(
    text: str, changed: str, added: Mapping[str, Quarantine], removed: Collection[str]
) -> bool:
    """Return whether a change does what it is to do, and nothing else."""
    expected = tomllib.loads(text)
    table = expected.setdefault("tool", {}).setdefault("pytest-megatron", {})
    patterns = table.setdefault(TABLE, {})
    for name in removed:
        patterns.pop(name, None)
    for name, one in added.items():
        patterns[name] = {"reason": one.reason, "until": one.until}
    try:
        found: object = tomllib.loads(changed)
    except tomllib.TOMLDecodeError:
        return False
    return found == expected


def owners_of(path: str, rules: str) -> str:
    """Return the owners of a file by a `CODEOWNERS` of GitHub or GitLab; empty if it has none.

    The last rule that matches decides. Source: GitHub's and GitLab's documentation, Code owners.
    """
    found = ""
    for line in rules.splitlines():
        words = line.partition(" #")[0].split()
        if words and not words[0].startswith(("#", "[", "^[", "!")) and _owns(words[0], path):
            found = " ".join(words[1:])
    return found


def _owns(pattern: str, path: str) -> bool:
    """Return whether a pattern, as in `.gitignore`, matches a file or a directory above it."""
    anchored = "/" in pattern.rstrip("/")
    parts = re.split(r"(\*\*/|\*\*|\*|\?)", pattern.strip("/"))
    wild = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    regex = "".join(wild.get(part, re.escape(part)) for part in parts)
    # As on GitHub, `docs/*` is about the files of that directory alone.
    below = "/.+" if pattern.endswith("/") else "" if pattern.endswith("/*") else "(?:/.*)?"
    return re.fullmatch(f"{'' if anchored else '(?:.*/)?'}{regex}{below}", path) is not None

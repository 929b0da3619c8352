"""From changed paths to the label that a pull request should have. Pure but for asking git.

Source: Megatron-LM skills/mcore-cicd/SKILL.md, "Which label to attach", d98e8a64dd
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_megatron.base.files import JsonValue
from pytest_megatron.base.git import ask_git
from pytest_megatron.ci.table import CiTable, PathClass
from pytest_megatron.errors import SelectionError

_PART = re.compile(r"\*\*/|/\*\*$|\*\*|\*|\?|\{[^{}]*\}|[^*?{}/]+|.")


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(_translated(pattern))


def _translated(pattern: str) -> str:
    text = ""
    for part in _PART.findall(pattern):
        match part:
            case "**/":
                text += "(?:.*/)?"
            case "/**":
                text += "/.*"
            case "**":
                text += ".*"
            case "*":
                text += "[^/]*"
            case "?":
                text += "[^/]"
            case _ if part[0] == "{" and part[-1] == "}":
                text += f"(?:{'|'.join(_translated(word) for word in part[1:-1].split(','))})"
            case _:
                text += re.escape(part)
    return text


def matches(path: str, pattern: str) -> bool:
    """Whether a path, with `/` between its parts, is what a pattern means."""
    return _compiled(pattern).fullmatch(path) is not None


def matches_any(path: str, patterns: Iterable[str]) -> bool:
    """Whether one of the patterns means the path; `!pattern` takes away what it matches.

    Patterns with `!` alone mean everything else.
    """
    wanted = [pattern for pattern in patterns if not pattern.startswith("!")]
    unwanted = [pattern[1:] for pattern in patterns if pattern.startswith("!")]
    if any(matches(path, pattern) for pattern in unwanted):
        return False
    return not wanted or any(matches(path, pattern) for pattern in wanted)


NO_CLASS = "unknown"
DOCS = "docs"
_STATUS = re.compile(r"([ADMTUX]|[RC]\d*)\t(.+)").fullmatch


@dataclass(frozen=True, slots=True, kw_only=True)
class PathChange:
    """One changed path.

    Attributes:
        status: `A` added, `D` deleted, `M` everything else.
    """

    path: str
    status: str = "M"


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """The label to attach.

    Attributes:
        label: None: none is needed.
        also: Labels besides.
        reason: Which paths ask for it.
        classes: Name of a class -> its paths, in the table's order.
        is_docs_only: Whether nothing but documentation changed.
    """

    label: str | None
    also: tuple[str, ...]
    reason: str
    classes: dict[str, tuple[str, ...]]
    is_docs_only: bool

    @property
    def labels(self) -> tuple[str, ...]:
        """All of them."""
        return (*(() if self.label is None else (self.label,)), *self.also)

    def as_json(self) -> dict[str, JsonValue]:
        """Return it for `plan --format json`."""
        return {
            "label": self.label,
            "labels": list(self.labels),
            "reason": self.reason,
            "docs_only": self.is_docs_only,
            "classes": {name: list(paths) for name, paths in self.classes.items()},
        }


def suggest(changes: Sequence[PathChange], table: CiTable) -> Suggestion:
    """Return the strongest label that a changed path asks for."""
    classes: dict[str, tuple[str, ...]] = {}
    asked: dict[str, PathClass] = {}
    also: list[str] = []
    for change in changes:
        found = _class_of(change, table)
        name = NO_CLASS if found is None else found.name
        classes[name] = (*classes.get(name, ()), change.path)
        if found is not None:
            also += found.also
            if found.label is not None:
                asked.setdefault(found.label, found)
    order = [one.name for one in table.paths]
    strength = {label: rank for rank, label in enumerate(table.label_strength)}
    label = max(asked, key=lambda word: strength.get(word, -1), default=None)
    return Suggestion(
        label=label,
        also=tuple(dict.fromkeys(also)),
        reason=_reason(classes, None if label is None else asked[label].name),
        classes={name: classes[name] for name in (*order, NO_CLASS) if name in classes},
        is_docs_only=bool(classes) and classes.keys() <= {DOCS},
    )


def _class_of(change: PathChange, table: CiTable) -> PathClass | None:
    for one in table.paths:
        is_status = not one.status or change.status in one.status
        if is_status and matches_any(change.path, one.match):
            return one
    return None


def _reason(classes: dict[str, tuple[str, ...]], deciding: str | None) -> str:
    if not classes:
        return "nothing changed"
    if deciding is None:
        return f"only {', '.join(sorted(classes))} changed"
    paths = classes[deciding]
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return f"{deciding} changed: {paths[0]}{more}"


def parse_changes(text: str) -> tuple[PathChange, ...]:
    """Return the changes that lines list: paths, or `git diff --name-status`."""
    changes: list[PathChange] = []
    for line in text.splitlines():
        if match := _STATUS(line.strip()):
            status = match[1] if match[1] in ("A", "D") else "M"
            paths = match[2].split("\t")  # of a rename both; a copy and its origin
            changes += [PathChange(path=path, status=status) for path in paths]
        elif line.strip():
            changes.append(PathChange(path=line.strip()))
    return tuple(changes)


def changes_since(root: Path, revision: str) -> tuple[PathChange, ...]:
    """Return what changed in a working tree since it left a revision.

    Raises:
        SelectionError: git does not know the revision, or there is no repository.
    """
    where = f"--diff {revision}"
    if revision.startswith("-"):
        raise SelectionError(where, "is no revision, expected a branch, a tag or a commit")
    base = _git(root, where, "merge-base", "HEAD", revision)
    tracked = _git(root, where, "diff", "--name-status", "--no-renames", "-z", base)
    words = iter(tracked.split("\0"))
    changed = [
        PathChange(path=path, status=status if status in ("A", "D") else "M")
        for status, path in zip(words, words, strict=False)
    ]
    new = _git(root, where, "ls-files", "--others", "--exclude-standard", "-z").split("\0")
    return (*changed, *(PathChange(path=path, status="A") for path in new if path))


def _git(root: Path, where: str, *arguments: str) -> str:
    found = ask_git(root, *arguments)
    if found is None:
        raise SelectionError(
            where,
            "git does not know it here, expected a revision with a commit in common; "
            "fetch it, or give --changed-paths",
        )
    return found

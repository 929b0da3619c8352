"""Patterns of paths: `*` and `?` within a folder, `**` across, `{a,b}` one of several. Pure."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable

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

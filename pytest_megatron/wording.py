"""Words that every report uses for ranks, for ends of processes and for numbers of things. Pure."""

from __future__ import annotations

import signal
from collections.abc import Iterable


def describe_exit(exit_code: int) -> str:
    """Return `was killed by SIGSEGV` or `exited with code 1`.

    Args:
        exit_code: As `Popen.returncode`: negative means killed by that signal.
    """
    if exit_code >= 0:
        return f"exited with code {exit_code}"
    try:
        return f"was killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"was killed by signal {-exit_code}"


def name_ranks(ranks: Iterable[int], what: str = "rank") -> str:
    """Return `rank 3`, or `ranks 0-2, 4`; of something else than ranks, with its own word."""
    numbers = sorted(set(ranks))
    parts: list[str] = []
    start = 0
    while start < len(numbers):
        end = start
        while end + 1 < len(numbers) and numbers[end + 1] == numbers[end] + 1:
            end += 1
        parts.append(str(numbers[start]) if start == end else f"{numbers[start]}-{numbers[end]}")
        start = end + 1
    return f"{what}{'' if len(numbers) == 1 else 's'} {', '.join(parts)}"


def printable(text: str) -> str:
    r"""Return text of anybody's as a terminal may show it: control characters as `\x1b`."""
    return "".join(
        char if char.isprintable() or char in "\n\t" else repr(char)[1:-1] for char in text
    )


def counted(number: int, what: str) -> str:
    """Return `1 error`, or `3 errors`."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def cut_middle(text: str, most_chars: int) -> str:
    """Return a text without the middle of one that is too long, and how much that was."""
    num_left_out = len(text) - most_chars
    if num_left_out <= 0:
        return text
    head, tail = text[: most_chars // 2], text[len(text) - most_chars // 2 :]
    return f"{head}\n[{num_left_out} of {len(text)} characters are left out here]\n{tail}"

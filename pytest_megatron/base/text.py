"""Words that every report uses for ranks, for ends of processes and for groups of things. Pure."""

from __future__ import annotations

import re
import signal
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


def describe_exit(exit_code: int) -> str:
    """Return `was killed by SIGSEGV` or `exited with code 1`.

    Args:
        exit_code: `Popen.returncode`: negative means killed by that signal.
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
    r"""Return text from outside as a terminal may show it: control characters as `\x1b`."""
    return "".join(
        char if char.isprintable() or char in "\n\t" else repr(char)[1:-1] for char in text
    )


def visible(text: str) -> str:
    """Return a text without colours; a character that cannot be seen becomes a replacement sign."""
    return re.sub(_HIDDEN, "\ufffd", without_colours(text))


def without_colours(text: str) -> str:
    """Return a text without what a terminal reads and does not show; all else stays."""
    return _ESCAPES.sub("", text)


def said_by(value: object) -> str:
    """Return the text of an object of the user's; its class where it has none."""
    try:
        return str.__str__(str(value))  # it may be of a subclass
    except Exception:  # noqa: BLE001 - its own code
        return f"<{type(value).__name__}, whose text cannot be had>"


def counted(number: int, one: str, many: str | None = None) -> str:
    """Return `1 error`, or `3 errors`; `many` is a plural of another form."""
    return f"1 {one}" if number == 1 else f"{number} {many or f'{one}s'}"


def none_or(number: float) -> str:
    """Return `none`, or the number."""
    return f"{number:g}" if number else "none"


def nodes_by_ranks(nodes: int, ranks: int) -> str:
    """Return `2x8 ranks`: nodes times ranks on each."""
    return f"{nodes}x{ranks} rank{'' if nodes * ranks == 1 else 's'}"


_MINUTES, _HOURS = 120, 7_200  # from so many seconds on


def rough_time(seconds: float) -> str:
    """Return a duration in its largest unit."""
    if seconds >= _HOURS:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.0f} min" if seconds >= _MINUTES else f"{seconds:.0f} s"


def listed(texts: Sequence[str], most: int) -> str:
    """Return `a, b and 3 more`."""
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more


def grouped(pairs: Iterable[tuple[_Key, _Value]]) -> dict[_Key, list[_Value]]:
    """Return the values of each key in their order, the keys in the order of their first values."""
    found: dict[_Key, list[_Value]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def closest(word: str, choices: Iterable[str]) -> str | None:
    """Return the choice that looks most like `word`; None if none looks like it."""
    import difflib  # noqa: PLC0415  every session imports this module, few have such an error

    return next(iter(difflib.get_close_matches(word, sorted(choices), 1)), None)


def nearest(word: str, choices: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` for the choice that looks most like `word`, or nothing."""
    close = closest(word, choices)
    return "" if close is None else f"; did you mean {close!r}?"


def one_of(word: object, choices: Iterable[object]) -> str:
    """Return `one of a, b`, and the choice that looks most like a wrong word."""
    words = [str(choice) for choice in choices]
    hint = nearest(word, words) if isinstance(word, str) else ""
    return f"one of {', '.join(sorted(words))}{hint}"


def columns(rows: Sequence[Sequence[str]], num_right: int = 0) -> list[str]:
    """Return a line for each row, its cells one below the other; the first ones to the right."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if column < num_right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def shorten(text: str, most: int) -> str:
    """Return a text as one line of at most so many characters."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - len(_ELLIPSIS)] + _ELLIPSIS


def cut_middle(text: str, most_chars: int) -> str:
    """Return a text without the middle of one that is too long, and how much that was."""
    num_left_out = len(text) - most_chars
    if num_left_out <= 0:
        return text
    head, tail = text[: most_chars // 2], text[len(text) - most_chars // 2 :]
    return f"{head}\n[{num_left_out} of {len(text)} characters are left out here]\n{tail}"


_HIDDEN = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]"
# Colours, titles of windows, times of Buildkite; and NUL, which torch's handler of signals writes.
_ESCAPES = re.compile(
    r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|[\]_][^\x07\x1b]*(?:\x07|\x1b\\)?|[()][0-9A-Z]|[=>78M])|\0"
)
_TICKS = re.compile(r"`+")
# Patterns of pages, which `re` compiles on first use: every start of pytest loads this module.
# A `_` between letters is never emphasis.
_SPECIAL = r"[\\`*<>\[\]#|]|(?<![^\W_])_|_(?![^\W_])"
_ELLIPSIS = "..."


def plain(text: str, most: int | None = None) -> str:
    """Return a text without colours and characters that cannot be seen; lines stay.

    Args:
        text: Anything.
        most: Characters to cut it to; None keeps all.
    """
    text = without_colours(text).replace("\r\n", "\n").replace("\t", "    ")
    text = "".join(c for c in text if c == "\n" or unicodedata.category(c)[0] != "C")
    if most is not None and len(text) > most:
        text = text[: most - len(_ELLIPSIS)] + _ELLIPSIS
    return text


def code(text: str, most: int | None = None) -> str:
    """Return one line as a code span, also where the text has backticks."""
    line = plain(" ".join(text.split()), most) or " "
    fence = "`" * (1 + max((len(found) for found in _TICKS.findall(line)), default=0))
    pad = " " if len(fence) > 1 else ""
    return f"{fence}{pad}{line}{pad}{fence}"


def fenced(text: str, most: int | None = None, language: str = "text") -> str:
    """Return lines as a block of code that the text cannot end."""
    shown = plain(text, most).strip("\n")
    fence = "`" * max(3, 1 + max((len(found) for found in _TICKS.findall(shown)), default=0))
    return f"{fence}{language}\n{shown}\n{fence}"


def escaped(text: str) -> str:
    """Return one line as prose, with nothing in it that Markdown or HTML would read."""
    text = re.sub(_SPECIAL, r"\\\g<0>", plain(" ".join(text.split())))
    return text.replace("@", "@\u200b")  # a log must not mention a user


def within(lines: str, most_bytes: int, rest: str) -> str:
    """Return the first lines that fit; `rest` is a last one, with the number of others for `{}`."""
    kept: list[str] = []
    found = lines.splitlines()
    for number, line in enumerate(found):
        most_bytes -= len(line.encode()) + 1
        if most_bytes < 0:
            kept.append(rest.format(len(found) - number))
            break
        kept.append(line)
    return "".join(f"{line}\n" for line in kept)


# The part of a command in GitHub's log behind which a space makes it harmless: behind white space
# of a line, which may begin after a carriage return; the old form anywhere.
# Source: actions/runner src/Runner.Common/ActionCommand.cs, TryParseV2() and TryParse().
GITHUB_COMMANDS = r"(?:(?<![^\r\n])[^\S\r\n]*:(?=:)|##(?=\[))"


def without_commands(log: str) -> str:
    """Return text for GitHub's log in which no line is a command."""
    return re.sub(GITHUB_COMMANDS, r"\g<0> ", log)


def workflow_command(name: str, properties: Mapping[str, object], message: str) -> str:
    """Return a command of a GitHub workflow, in one line; a property without a value is left out.

    Source: actions/runner src/Runner.Common/ActionCommand.cs, escape mappings.
    """
    shown = ",".join(
        f"{key}={_percent(str(value), ',:')}" for key, value in properties.items() if value
    )
    return f"::{name}{' ' if shown else ''}{shown}::{_percent(message)}"


_MOST_ANNOTATIONS = 10  # of each kind, that GitHub shows of a step


def within_limit(errors: Sequence[str], rest: str) -> list[str]:
    """Return the annotations of a step that GitHub shows, and a notice that counts the others.

    Args:
        errors: Commands.
        rest: Where the others are.
    """
    shown, others = list(errors[:_MOST_ANNOTATIONS]), errors[_MOST_ANNOTATIONS:]
    if others:
        shown.append(
            workflow_command("notice", {}, f"{counted(len(others), 'more failure')}: {rest}")
        )
    return shown


def _percent(text: str, special: str = "") -> str:
    """Escape text for a workflow command."""
    for character in "%\r\n" + special:
        text = text.replace(character, f"%{ord(character):02X}")
    return text

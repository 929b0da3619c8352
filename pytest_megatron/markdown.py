"""Markdown of texts that nobody vouches for: names of tests, lines of logs. Pure.

Whatever a text holds, it stays a text: no markup, no HTML, no mention, no other direction of
writing, and no end of the cell or fence that it stands in.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?")
_TICKS = re.compile(r"`+")
_SPECIAL = "\\`*_<>[]#|"
_ELLIPSIS = "..."


def plain(text: str, most: int | None = None) -> str:
    """Return a text without colours and characters that cannot be seen; lines stay.

    Args:
        text: Anything.
        most: Characters to cut it to; None keeps all.
    """
    text = _ESCAPES.sub("", text).replace("\r\n", "\n").replace("\t", "    ")
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
    text = plain(" ".join(text.split()))
    for character in _SPECIAL:
        text = text.replace(character, f"\\{character}")
    return text.replace("@", "@\u200b")  # no mention: nobody is to be told of a log's words


def table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """Return a table of cells that are Markdown already.

    Args:
        head: Names of the columns.
        rows: Cells of each row.
        numbers: Columns that are aligned to the right.
    """
    rule = ["---:" if column in numbers else "---" for column in range(len(head))]
    lines = [head, rule, *([_cell(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(markdown: str) -> str:
    """Return what ends no cell: a bar ends one even in a code span."""
    return re.sub(r"(?<!\\)\|", r"\\|", markdown)

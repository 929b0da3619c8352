"""Brings the table of `options.md` into line with the table of options.

    python docs/reference/option_tables.py

Markup, and details after the first semicolon of a cell, are written in the page. A test compares
it with the options.
"""

# ruff: noqa: INP001 - a script, no package

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from pytest_megatron.session.options import OPTION_ROWS, dest

PAGE = Path(__file__).parent / "options.md"
_ROW = re.compile(r"^\| `--([\w-]+)[^`]*` \| `\w+` \| (.*?) \| (.*) \|$", re.MULTILINE)
HEAD = "| option | ini option | default | meaning |\n|---|---|---|---|\n"


def table() -> str:
    """Return the table, with its head."""
    return HEAD + "".join(f"{row}\n" for row in _rows(PAGE.read_text(encoding="utf-8")))


def _rows(page: str) -> Iterator[str]:
    """Yield a line for each option; a cell of the page stays where it begins as the option's text.

    Such a cell may have links and code spans, and details after a semicolon.
    """
    cells = {name: rest for name, *rest in _ROW.findall(page)}
    for row in OPTION_ROWS.values():
        name = f"--{row.name} {row.metavar}".strip().replace("|", "\\|")
        default, text = cells.get(row.name, ("", ""))
        if _plain(default) != row.shown_default:
            default = row.shown_default
        if _plain(text).partition(";")[0] != row.text:
            text = row.text
        yield f"| `{name}` | `{dest(row.name)}` | {default} | {text} |"


def _plain(cell: str) -> str:
    """Return a cell without links and code spans."""
    return re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", cell).replace("`", "")


def main() -> None:
    """Replace the table of the page."""
    text = PAGE.read_text(encoding="utf-8")
    old = re.search(rf"^{re.escape(HEAD)}(?:\|.*\n)+", text, re.MULTILINE)
    assert old is not None
    PAGE.write_text(text.replace(old[0], table()), encoding="utf-8")


if __name__ == "__main__":
    main()

"""Writes the table of `options.md` from the table of options.

    python docs/reference/option_tables.py

A test compares the page with the options.
"""

# ruff: noqa: INP001 - a script, no package

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from pytest_megatron.hooks.option_values import dest
from pytest_megatron.hooks.options import OPTION_ROWS

PAGE = Path(__file__).parent / "options.md"
HEAD = "| option | ini option | default | meaning |\n|---|---|---|---|\n"


def table() -> str:
    """Return the table, with its head."""
    return HEAD + "".join(f"{row}\n" for row in _rows())


def _rows() -> Iterator[str]:
    for row in OPTION_ROWS.values():
        name = f"--{row.name} {row.metavar}".strip().replace("|", "\\|")
        yield f"| `{name}` | `{dest(row.name)}` | {row.shown_default} | {row.text} |"


def main() -> None:
    """Replace the table of the page."""
    text = PAGE.read_text(encoding="utf-8")
    old = re.search(rf"^{re.escape(HEAD)}(?:\|.*\n)+", text, re.MULTILINE)
    assert old is not None
    PAGE.write_text(text.replace(old[0], table()), encoding="utf-8")


if __name__ == "__main__":
    main()

"""Brings the tables of `options.md` into line with the table of options.

    python3 dev.py generate

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
_ROW = re.compile(r"^\| `(?:--|megatron_)([\w-]+).*` \| (.*?) \| (.*) \|$", re.MULTILINE)
OPTIONS = "| option | ini option | default | meaning |\n|---|---|---|---|\n"
SETTINGS = "| setting | default | meaning |\n|---|---|---|\n"


def tables() -> list[str]:
    """Return the tables of options and of settings, with their heads."""
    page = PAGE.read_text(encoding="utf-8")
    return [
        head + "".join(f"{row}\n" for row in _rows(page, are_settings=head == SETTINGS))
        for head in (OPTIONS, SETTINGS)
    ]


def _rows(page: str, *, are_settings: bool) -> Iterator[str]:
    """Yield a line for each option; a cell of the page stays where it begins as the option's text.

    Such a cell may have links and code spans, and details after a semicolon.
    """
    cells = {name.replace("_", "-"): rest for name, *rest in _ROW.findall(page)}
    for row in OPTION_ROWS.values():
        if row.is_setting != are_settings:
            continue
        gap = "=" if are_settings else " "
        name = f"{row.typed_name}{gap}{row.metavar}".strip().replace("|", "\\|")
        names = f"`{name}`" if are_settings else f"`{name}` | `{dest(row.name)}`"
        default, text = cells.get(row.name, ("", ""))
        if _plain(default) != row.shown_default:
            default = row.shown_default
        if _plain(text).partition(";")[0] != row.text:
            text = row.text
        yield f"| {names} | {default} | {text} |"


def _plain(cell: str) -> str:
    """Return a cell without links and code spans."""
    return re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", cell).replace("`", "")


def main() -> None:
    """Replace the tables of the page."""
    text = PAGE.read_text(encoding="utf-8")
    for head, new in zip((OPTIONS, SETTINGS), tables(), strict=True):
        old = re.search(rf"^{re.escape(head)}(?:\|.*\n)+", text, re.MULTILINE)
        assert old is not None
        text = text.replace(old[0], new)
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

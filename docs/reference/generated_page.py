"""Puts tables that a script makes into a page, between comments that name the script."""

# ruff: noqa: INP001 - beside scripts, no package

from __future__ import annotations

from pathlib import Path


def with_tables(text: str, script: str, tables: str) -> str:
    """Return the text of a page with the tables of a script in the place of those that it has."""
    begin, end = f"<!-- tables: {Path(script).name} -->\n", "\n\n<!-- end of tables -->"
    head, _, rest = text.partition(begin)
    return f"{head}{begin}{tables}{end}{rest.partition(end)[2]}"


def write_tables(page: Path, script: str, tables: str) -> None:
    """Replace the tables of a script in a page."""
    text = page.read_text(encoding="utf-8")
    page.write_text(with_tables(text, script, tables), encoding="utf-8")

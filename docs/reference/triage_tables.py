"""Writes the tables of families and signatures into `triage.md` from the data.

    python docs/reference/triage_tables.py

A test compares the page with the data.
"""

# ruff: noqa: INP001 - a script, no package

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from pytest_megatron.triage.signatures import SearchedText, Table, builtin_table

PAGE = Path(__file__).parent / "triage.md"
_PLACES = {
    SearchedText.LINE: "any line",
    SearchedText.RAISED: "an exception",
    SearchedText.EXIT: "exit of a rank",
    SearchedText.ENGINE: "an engine's word",
}


def families(table: Table) -> Iterator[str]:
    """Yield the rows of the table of families."""
    yield "| family | meaning |"
    yield "|---|---|"
    for name, meaning in sorted(table.families.items()):
        yield f"| `{name}` | {meaning} |"


def signatures(table: Table) -> Iterator[str]:
    """Yield the rows of the table of signatures, in the order in which they are tried."""
    yield "| id | family | transient | policy | role | in | for example | advice |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in table.signatures:
        example = row.examples[0].partition("\n")[0].replace("|", "\\|")
        quote, pad = ("``", " ") if "`" in example else ("`", "")
        cells = (
            *(f"`{row.id}`", row.family, "yes" if row.is_transient else "no", row.policy.value),
            *(row.role.value, _PLACES[row.where], f"{quote}{pad}{example}{pad}{quote}", row.advice),
        )
        yield f"| {' | '.join(cells)} |"


def main() -> None:
    """Replace both tables."""
    text = PAGE.read_text(encoding="utf-8")
    table = builtin_table()
    for rows in (list(families(table)), list(signatures(table))):
        old = re.search(rf"^{re.escape(rows[0])}\n(?:\|.*\n)+", text, re.MULTILINE)
        assert old is not None
        text = text.replace(old[0], "".join(f"{row}\n" for row in rows))
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

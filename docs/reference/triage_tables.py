"""Makes the tables of families and signatures of `triage.md` from the data, for the site."""

# ruff: noqa: INP001 - a script, no package

from __future__ import annotations

from collections.abc import Iterator

from pytest_megatron.triage.signatures import SearchedText, builtin_table

_PLACES = {
    SearchedText.LINE: "any line",
    SearchedText.RAISED: "an exception",
    SearchedText.EXIT: "exit of a rank",
    SearchedText.ENGINE: "an engine's word",
}


def families() -> Iterator[str]:
    """Yield the rows of the table of families."""
    yield "| family | meaning |"
    yield "|---|---|"
    for name, meaning in sorted(builtin_table().families.items()):
        yield f"| `{name}` | {meaning} |"


def signatures() -> Iterator[str]:
    """Yield the rows of the table of signatures, in the order in which they are tried."""
    yield "| id | family | transient | policy | role | in | for example | advice |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in builtin_table().signatures:
        example = row.examples[0].partition("\n")[0].replace("|", "\\|")
        quote, pad = ("``", " ") if "`" in example else ("`", "")
        cells = (
            *(f"`{row.id}`", row.family, "yes" if row.is_transient else "no", row.policy.value),
            *(row.role.value, _PLACES[row.where], f"{quote}{pad}{example}{pad}{quote}", row.advice),
        )
        yield f"| {' | '.join(cells)} |"

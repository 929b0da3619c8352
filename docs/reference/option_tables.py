"""Brings the tables of `options.md` into line with the table of options.

    python3 dev.py generate

Markup, and details after the first semicolon of a cell, are written in the page. A test compares
it with the options.
"""

# ruff: noqa: INP001 - a script, no package

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from pytest_megatron.session.options import OPTION_ROWS, OptionRow

PAGE = Path(__file__).parent / "options.md"
_ROW = re.compile(r"^\| `(?:--|megatron_)([\w-]+)[^`]*` \| (.*?) \| (.*) \|$", re.MULTILINE)
OPTIONS = "| option | default | meaning |\n|---|---|---|\n"
SETTINGS = "| setting | default | meaning |\n|---|---|---|\n"
# Of each table of options, in the order of the page.
GROUPS = (
    ("ranks", "gpus", "platform", "golden", "plan"),
    (
        *("device", "rank-timeout", "rerun-transient", "leaks", "tee-ranks", "pdb-rank"),
        *("ranks-per-gpu", "nnodes", "node-rank", "rdzv-endpoint"),
    ),
    (
        *("model", "test-case", "scope", "cadence", "environment", "tag"),
        *("labels", "ci-event", "bucket", "allow-empty"),
    ),
    (
        *("executor", "executor-config", "run-dir", "n-repeat", "max-attempts", "lightweight"),
        *("golden-policy", "golden-reason", "allow-dirty", "fake-ranks", "tensor-trace"),
    ),
)


def tables() -> list[str]:
    """Return the tables of options and the one of settings, with their heads."""
    page = PAGE.read_text(encoding="utf-8")
    cells = {name.replace("_", "-"): rest for name, *rest in _ROW.findall(page)}
    rows = {row.name: row for row in OPTION_ROWS.values()}
    settings = [row for row in rows.values() if row.is_setting]
    groups = [[rows.pop(name) for name in group] for group in GROUPS]
    assert list(rows.values()) == settings, "every option is in one of GROUPS"
    return [*(OPTIONS + _rows(cells, group) for group in groups), SETTINGS + _rows(cells, settings)]


def _rows(cells: Mapping[str, list[str]], rows: Iterable[OptionRow]) -> str:
    """Return a line for each option; a cell of the page stays where it begins as the option's text.

    Such a cell may have links and code spans, and details after a semicolon.
    """
    lines = ""
    for row in rows:
        gap = "=" if row.is_setting else " "
        name = f"{row.typed_name}{gap}{row.metavar}".strip().replace("|", "\\|")
        default, text = cells.get(row.name, ("", ""))
        if _plain(default) != row.shown_default:
            default = row.shown_default
        if _plain(text).partition(";")[0] != row.text:
            text = row.text
        lines += f"| `{name}` | {default} | {text} |\n"
    return lines


def _plain(cell: str) -> str:
    """Return a cell without links and code spans."""
    return re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", cell).replace("`", "")


def main() -> None:
    """Replace the tables of the page."""
    new = iter(tables())
    heads = f"{re.escape(OPTIONS)}|{re.escape(SETTINGS)}"
    text = PAGE.read_text(encoding="utf-8")
    text = re.sub(rf"^(?:{heads})(?:\|.*\n)*", lambda _: next(new), text, flags=re.MULTILINE)
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

"""Writes the tables of rules, troubles and drivers into `doctor.md` and `checks.md` from the data.

    python docs/reference/doctor_tables.py

A test compares the page with the data.
"""

# ruff: noqa: INP001 - a script, no package

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path

from generated_page import write_tables

from pytest_megatron.doctor.command import rules
from pytest_megatron.doctor.facts import compat
from pytest_megatron.workloads.training.checks.rules import CheckRule, check_rules

PAGE = Path(__file__).parent / "doctor.md"
CHECKS = Path(__file__).parent / "checks.md"


def tables() -> str:
    """Return all tables, with their headings."""
    own = {name: rule for name, rule in rules().items() if name not in check_rules()}
    return "\n".join([*_rules(own), *_troubles(), *_drivers(), *_packages()])


def check_tables() -> str:
    """Return the tables of what is checked about workloads."""
    return "\n".join(_rules(check_rules()))


def _rules(shown: Mapping[str, CheckRule]) -> Iterator[str]:
    yield "\n## Rules\n"
    yield "| id | severity | what is checked | why it matters | what to do | source |"
    yield "|---|---|---|---|---|---|"
    for group, members in itertools.groupby(shown.values(), key=lambda rule: rule.group):
        yield f"| **{group}** | | | | | |"
        for rule in members:
            cells = (rule.checks, rule.wrong, rule.mend, rule.source)
            words = (cell.replace("|", "\\|").replace("*", "\\*") for cell in cells)
            yield f"| `{rule.id}` | {rule.severity.value} | {' | '.join(words)} |"


def _troubles() -> Iterator[str]:
    yield "\n## Troubles by name\n"
    yield "| what install guides call it | rules |"
    yield "|---|---|"
    found: dict[str, list[CheckRule]] = {}
    for rule in rules().values():
        if rule.trouble is not None:
            found.setdefault(rule.trouble, []).append(rule)
    for trouble, members in sorted(found.items()):
        yield f"| {trouble} | {', '.join(f'`{rule.id}`' for rule in members)} |"


def _drivers() -> Iterator[str]:
    yield "\n## Drivers\n"
    yield "| CUDA | least driver | release: driver that it came with |"
    yield "|---|---|---|"
    for major, least in compat().least_driver.items():
        found = compat().release_driver.items()
        shown = (f"{cuda}: {driver}" for cuda, driver in found if cuda.split(".")[0] == major)
        yield f"| {major} | {least} | {', '.join(shown)} |"


def _packages() -> Iterator[str]:
    yield "\n## Compiled packages\n"
    yield "| package | for | published wheels are named | compiled with | source |"
    yield "|---|---|---|---|---|"
    for row in compat().compiled:
        wheel = f"`{row.wheel}`" if row.wheel else "none are published"
        build = row.build or f"{row.force} pip install --no-build-isolation {row.name}"
        yield f"| {row.name} | {row.why} | {wheel} | `{build}` | {row.source} |"


def main() -> None:
    """Replace the tables of both pages."""
    write_tables(PAGE, __file__, tables())
    write_tables(CHECKS, __file__, check_tables())


if __name__ == "__main__":
    main()

"""Makes the tables of `doctor.md` and `checks.md` from the data, for the site."""

# ruff: noqa: INP001 - a script, no package

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

from pytest_megatron.doctor.command import rules
from pytest_megatron.doctor.facts import compat
from pytest_megatron.workloads.training.checks.rules import CheckRule, check_rules


def doctor_rules() -> Iterator[str]:
    """Yield the rows of the rules about an environment."""
    yield from _rules({name: row for name, row in rules().items() if name not in check_rules()})


def workload_rules() -> Iterator[str]:
    """Yield the rows of the rules about workloads."""
    yield from _rules(check_rules())


def _rules(shown: Mapping[str, CheckRule]) -> Iterator[str]:
    yield "| id | severity | what is checked | why it matters | what to do | source |"
    yield "|---|---|---|---|---|---|"
    for group, members in itertools.groupby(shown.values(), key=lambda rule: rule.group):
        yield f"| **{group}** | | | | | |"
        for rule in members:
            cells = (rule.checks, rule.wrong, rule.fix, rule.source)
            words = (cell.replace("|", "\\|").replace("*", "\\*") for cell in cells)
            yield f"| `{rule.id}` | {rule.severity.value} | {' | '.join(words)} |"


def troubles() -> Iterator[str]:
    """Yield the rows of what install guides call the rules."""
    yield "| what install guides call it | rules |"
    yield "|---|---|"
    found: dict[str, list[CheckRule]] = {}
    for rule in rules().values():
        if rule.trouble is not None:
            found.setdefault(rule.trouble, []).append(rule)
    for trouble, members in sorted(found.items()):
        yield f"| {trouble} | {', '.join(f'`{rule.id}`' for rule in members)} |"


def drivers() -> Iterator[str]:
    """Yield the rows of the drivers that each CUDA needs."""
    yield "| CUDA | least driver | release: driver that it came with |"
    yield "|---|---|---|"
    for major, least in compat().least_driver.items():
        found = compat().release_driver.items()
        shown = (f"{cuda}: {driver}" for cuda, driver in found if cuda.split(".")[0] == major)
        yield f"| {major} | {least} | {', '.join(shown)} |"


def packages() -> Iterator[str]:
    """Yield the rows of packages that are compiled against torch."""
    yield "| package | for | published wheels are named | compiled with | source |"
    yield "|---|---|---|---|---|"
    for row in compat().compiled:
        wheel = f"`{row.wheel}`" if row.wheel else "none are published"
        build = row.build or f"{row.force} pip install --no-build-isolation {row.name}"
        yield f"| {row.name} | {row.why} | {wheel} | `{build}` | {row.source} |"

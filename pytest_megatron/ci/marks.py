"""Python tests that an environment, a tag and a platform leave out, by their marks. Pure.

Source: Megatron-LM tests/unit_tests/run_ci_test.sh, d98e8a64dd
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Literal

from pytest_megatron.ci.table import CiTable, MarkRule

EXPERIMENTAL = "experimental"
LAUNCH_ON = "launch_on_"
Experimental = Literal["exclude", "include", "only"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkChoice:
    """The environments, tags and platforms that tests are wanted for.

    Attributes:
        environments, tags, platforms: Empty leaves none out.
    """

    environments: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    platforms: tuple[str, ...] = ()
    experimental: Experimental = "exclude"


def launch_mark(platform: str) -> str:
    """Return the mark of tests that run on a platform: `launch_on_gb200` of `dgx_gb200`."""
    return f"{LAUNCH_ON}{platform.removeprefix('dgx_')}"


def wanted_launch_marks(platforms: Iterable[str], table: CiTable) -> tuple[str, ...]:
    """Return the marks of which a test needs one; none if all tests run on one of the platforms."""
    asked = tuple(platforms)
    if not asked or not set(asked) <= set(table.opt_in_platforms):
        return ()
    return tuple(map(launch_mark, asked))


def reason_to_leave_out(marks: AbstractSet[str], choice: MarkChoice, table: CiTable) -> str | None:
    """Return the mark, or the lack of one, that keeps a test out; None if it runs.

    Args:
        marks: Names of the test's marks.
        choice: What tests are wanted for.
        table: The project's.
    """
    launch = wanted_launch_marks(choice.platforms, table)
    if launch and not marks & set(launch):
        return f"without {' or '.join(launch)}"
    if choice.experimental == "exclude" and EXPERIMENTAL in marks:
        return EXPERIMENTAL
    if choice.experimental == "only" and EXPERIMENTAL not in marks:
        return f"not {EXPERIMENTAL}"
    for rule in table.marks:
        if rule.mark in marks and _applies(rule, choice):
            return rule.mark
    return None


def _applies(rule: MarkRule, choice: MarkChoice) -> bool:
    """Whether all that tests are wanted for is what the rule is about."""
    pairs = (
        (rule.environment, choice.environments),
        (rule.tag, choice.tags),
        (rule.platform, choice.platforms),
    )
    return all(not words or (asked and set(asked) <= set(words)) for words, asked in pairs)


def known_marks(table: CiTable) -> dict[str, str]:
    """Return the marks that mean something here, each with what it does."""
    found = {EXPERIMENTAL: "runs with --experimental-tests include or only"}
    for platform in table.opt_in_platforms:
        found[launch_mark(platform)] = f"runs on {platform} as well, where others do not"
    for rule in table.marks:
        parts = [
            f"{what} {' or '.join(words)}"
            for what, words in (
                ("environment", rule.environment),
                ("tag", rule.tag),
                ("platform", rule.platform),
            )
            if words
        ]
        found[rule.mark] = f"left out for {', '.join(parts)}" if parts else "left out"
    return found

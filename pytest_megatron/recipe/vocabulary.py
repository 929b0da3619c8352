"""The words of recipes, and their meaning to Megatron-LM's parser. Data, and look-ups.

A project adds its own words (`Vocabulary.extended`); nothing here reads a file.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

# Scope as written -> the tier that CI asks for, and the cadence that the tier implies.
# Source: Megatron-LM tests/test_utils/python_scripts/recipe_parser.py, d98e8a64dd
SCOPE_ALIASES = {"mr-github-slim": "L0", "mr-github": "L1", "nightly": "L2", "weekly": "L3"}
IMPLIED_CADENCE: dict[str, tuple[str, ...]] = {"nightly": ("nightly",), "weekly": ("weekly",)}
DEFAULT_CADENCE: tuple[str, ...] = ("pr", "nightly", "mergegroup")
CADENCES = ("mergegroup", "nightly", "pr", "weekly")

# A scope that ends in one of these, or is one of those, matches no CI filter: that is how rows
# are switched off.
DISABLED_SUFFIXES = ("-broken", "-temp-disabled")
DISABLED_SCOPES = ("deprecated", "flaky")

UNIT_MODEL = "unit-tests"  # of rows that are buckets of unit tests, and no workloads

_SCOPES = (
    *("L0", "L0-smoke", "L1", "L2", "L3", "cleanup", "deprecated", "flaky", "mr", "mr-github"),
    *("mr-github-slim", "mr-slim", "nightly", "release", "unit-tests", "weekly"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Every word that means something in a recipe or a selection option."""

    scopes: frozenset[str] = frozenset(_SCOPES)
    platforms: frozenset[str] = frozenset(
        {"cpu", "dgx_a100", "dgx_gb200", "dgx_h100", "dgx_h200"},
    )
    environments: frozenset[str] = frozenset({"dev", "lts"})
    cadences: frozenset[str] = frozenset(CADENCES)

    def extended(
        self,
        *,
        scopes: Iterable[str] = (),
        platforms: Iterable[str] = (),
        environments: Iterable[str] = (),
    ) -> Vocabulary:
        """Return this vocabulary with a project's own words added."""
        return replace(
            self,
            scopes=self.scopes | set(scopes),
            platforms=self.platforms | set(platforms),
            environments=self.environments | set(environments),
        )

    def known(self, key: str) -> frozenset[str] | None:
        """Return the words that a recipe key takes, None for a key that takes any value."""
        return {
            "scope": self.scopes,
            "platforms": self.platforms,
            "environment": self.environments,
            "cadence": self.cadences,
        }.get(key)

    def knows(self, key: str, word: str) -> bool:
        """Return whether `word` means something for `key`; a disabled scope is a known one."""
        known = self.known(key)
        if known is None or word in known:
            return True
        return key == "scope" and enabled_scope(word) in self.scopes


def enabled_scope(scope: str) -> str:
    """Return a scope without the suffix that disables it."""
    for suffix in DISABLED_SUFFIXES:
        scope = scope.removesuffix(suffix)
    return scope


def disabled_reason(scope: str) -> str | None:
    """Return why rows of a scope do not run, None if they do."""
    if scope in DISABLED_SCOPES or scope.endswith(DISABLED_SUFFIXES):
        return f"scope {scope!r} disables the row"
    return None

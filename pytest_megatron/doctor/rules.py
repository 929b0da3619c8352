"""All rules that doctor shows: its own, and those about workloads."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

from pytest_megatron.checks.rules import CheckFinding, CheckRule, RuleMatch, check_rules, read_rules
from pytest_megatron.checks.rules import finding_of as finding_in

TABLE = Path(__file__).parent / "rules.toml"


@functools.cache
def rules() -> Mapping[str, CheckRule]:
    """Return the rules by id, in the order of the report."""
    return {**read_rules(TABLE), **check_rules()}


def finding_of(hit: RuleMatch) -> CheckFinding:
    """Return what a check says in the words of its rule."""
    return finding_in(hit, rules())

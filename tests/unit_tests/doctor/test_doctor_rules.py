"""The table of rules is whole, and the reference page says what it says."""

from __future__ import annotations

import pytest

from pytest_megatron.doctor.command import finding_of, rules
from pytest_megatron.doctor.facts import compat
from pytest_megatron.workloads.training.checks.rules import RuleMatch


@pytest.mark.parametrize("rule", rules().values(), ids=list(rules()))
def test_a_rule_fills_in_its_texts(rule: object) -> None:
    assert isinstance(rule, type(next(iter(rules().values()))))
    finding = finding_of(RuleMatch(rule.id, **dict.fromkeys(rule.names, "{x}")))
    assert all((finding.found, finding.wrong, finding.fix, finding.source, rule.checks))


def test_every_cuda_has_the_least_driver_of_its_major_version() -> None:
    assert {cuda.partition(".")[0] for cuda in compat().release_driver} == set(
        compat().least_driver
    )

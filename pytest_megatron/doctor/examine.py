"""Puts facts and checks together: what is wrong here, in the order of the rules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pytest_megatron.checks.rules import CheckFinding, CheckSeverity, RuleMatch
from pytest_megatron.doctor.check_cuda import check_cuda, check_torch
from pytest_megatron.doctor.check_machine import (
    check_communication,
    check_machine,
    check_megatron,
)
from pytest_megatron.doctor.check_packages import check_build, check_compiled, check_requirements
from pytest_megatron.doctor.check_project import check_project
from pytest_megatron.doctor.check_recipe import Needs, check_recipe
from pytest_megatron.doctor.check_variables import check_variables
from pytest_megatron.doctor.facts import EnvironmentFacts
from pytest_megatron.doctor.gather import gather
from pytest_megatron.doctor.places import SystemView
from pytest_megatron.doctor.rules import finding_of, rules


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """What was looked at, and what was found, in the order of the rules."""

    facts: EnvironmentFacts
    findings: tuple[CheckFinding, ...]

    def count(self, severity: CheckSeverity) -> int:
        """Return the number of findings of a severity."""
        return sum(finding.severity is severity for finding in self.findings)

    def exit_code(self, *, is_strict: bool) -> int:
        """Return 2 if there are errors, 1 if warnings count and there are some, else 0."""
        if self.count(CheckSeverity.ERROR):
            return 2
        return int(is_strict and bool(self.count(CheckSeverity.WARNING)))


def examine(
    places: SystemView, *, needs: Needs | None = None, with_collective: bool = True
) -> Examination:
    """Gather facts and check them.

    Raises:
        HostError: The environment's Python does not run.
    """
    facts = gather(places, with_collective=with_collective)
    order = list(rules())
    findings = [finding_of(hit) for hit in check(facts, places, needs)]
    findings.sort(key=lambda finding: order.index(finding.rule.id))
    return Examination(facts=facts, findings=tuple(findings))


def check(
    facts: EnvironmentFacts, places: SystemView, needs: Needs | None = None
) -> Iterator[RuleMatch]:
    """Yield everything that is wrong."""
    yield from check_cuda(facts, places.env)
    yield from check_torch(facts, places.env)
    yield from check_compiled(facts)
    yield from check_requirements(facts)
    yield from check_build(facts, places.wheel_host[0])
    yield from check_megatron(facts)
    yield from check_communication(facts, places.env)
    yield from check_variables(facts, places.env)
    yield from check_machine(facts, places.env)
    yield from check_project(facts, places)
    if needs is not None:
        yield from check_recipe(facts, places, needs)

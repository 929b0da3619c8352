"""Puts facts and checks together: what is wrong here, in the order of the rules."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pytest_megatron.base.findings import Severity
from pytest_megatron.base.schema import trusted
from pytest_megatron.doctor.checks.cuda import check_cuda, check_torch
from pytest_megatron.doctor.checks.machine import (
    check_communication,
    check_machine,
    check_megatron,
    check_variables,
)
from pytest_megatron.doctor.checks.packages import check_build, check_compiled, check_requirements
from pytest_megatron.doctor.checks.project import Needs, check_project, check_recipe
from pytest_megatron.doctor.facts import EnvironmentFacts, Python, SystemView, compat
from pytest_megatron.doctor.probes.child import ask
from pytest_megatron.doctor.probes.devices import (
    SCRIPTS,
    look_at_devices,
    look_at_torch,
    try_collectives,
)
from pytest_megatron.doctor.probes.machine import (
    look_at_checkout,
    look_at_machine,
    look_at_slurm,
    look_at_toolkit,
)
from pytest_megatron.doctor.probes.packages import (
    find_megatrons,
    find_shadows,
    read_extensions,
    read_packages,
)
from pytest_megatron.errors import HostError
from pytest_megatron.workloads.training.checks.rules import (
    CheckFinding,
    CheckRule,
    RuleMatch,
    check_rules,
    read_rules,
)
from pytest_megatron.workloads.training.checks.rules import finding_of as finding_in

_START_LIMIT_S = 30.0
# Source: glibc elf/rtld.c, do_preload; these words are not translated.
_NOT_PRELOADED = re.compile(
    r"^ERROR: ld\.so: object '(.+)' from LD_PRELOAD cannot be preloaded(?: \((.+)\))?: ignored\.",
    re.MULTILINE,
)


def gather(places: SystemView, *, with_collective: bool = True) -> EnvironmentFacts:
    """Return everything that is known.

    Args:
        places: Where to look.
        with_collective: Whether to try all_reduces, if torch can be imported.

    Raises:
        HostError: The environment's Python does not run.
    """
    python = _python(places)
    packages, doubles = read_packages(python.paths)
    table = compat().compiled
    installed = [row for row in table if {row.name, *row.also} & packages.keys()]
    modules = [module for row in installed for module in row.modules]
    facts = EnvironmentFacts(
        python=python,
        packages=packages,
        doubles=doubles,
        extensions=tuple(read_extensions(python.paths, table)),
        shadows=tuple(find_shadows(python.paths, packages, table)),
        megatrons=find_megatrons(python.paths, packages),
        torch=look_at_torch(places, packages.get("torch"), modules),
        devices=look_at_devices(places),
        machine=look_at_machine(places),
        slurm=look_at_slurm(places),
        git_mend=look_at_checkout(places),
    )
    lacks = len(installed) < len(table) and facts.torch is not None and bool(facts.torch.cuda)
    facts = replace(facts, toolkit=look_at_toolkit(places, ask_network=lacks))
    if with_collective and facts.torch is not None and facts.torch.problem is None:
        num_gpus = facts.torch.count if facts.torch.cuda_problem is None else 0
        facts = replace(facts, collectives=tuple(try_collectives(places, num_gpus)))
    return facts


def _python(places: SystemView) -> Python:
    """Ask the Python that is examined for its version and paths."""
    answer = ask(
        places.python,
        SCRIPTS / "environment.py",
        limit_s=_START_LIMIT_S,
        env=places.env,
        cwd=places.project,
    )
    if answer.problem is not None or "tag" not in answer.values:
        raise HostError(
            str(places.python),
            f"{answer.problem or 'says nothing of itself'}, expected the Python of an environment",
        )
    not_preloaded = {
        path: why or "it cannot be loaded" for path, why in _NOT_PRELOADED.findall(answer.text)
    }
    return trusted(Python, {**answer.values, "not_preloaded": not_preloaded})


TABLE = Path(__file__).parent / "rules.toml"


@functools.cache
def rules() -> Mapping[str, CheckRule]:
    """Return the rules by id, in the order of the report."""
    return {**read_rules(TABLE), **check_rules()}


def finding_of(hit: RuleMatch) -> CheckFinding:
    """Return the finding of a check in the words of its rule."""
    return finding_in(hit, rules())


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """Facts and findings, in the order of the rules."""

    facts: EnvironmentFacts
    findings: tuple[CheckFinding, ...]

    def count(self, severity: Severity) -> int:
        """Return the number of findings of a severity."""
        return sum(finding.severity is severity for finding in self.findings)

    def exit_code(self, *, is_strict: bool) -> int:
        """Return 2 if there are errors, 1 if warnings count and there are some, else 0."""
        if self.count(Severity.ERROR):
            return 2
        return int(is_strict and bool(self.count(Severity.WARNING)))


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

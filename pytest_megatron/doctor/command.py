"""`pytest-megatron doctor`: problems of this machine and this environment, by rules over facts."""

from __future__ import annotations

import functools
import json
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import click

from pytest_megatron.base.command import PATH, format_option
from pytest_megatron.base.files import JsonValue
from pytest_megatron.base.findings import Severity
from pytest_megatron.base.schema import trusted
from pytest_megatron.base.text import counted
from pytest_megatron.doctor.checks.cuda import check_cuda, check_torch
from pytest_megatron.doctor.checks.machine import (
    check_communication,
    check_machine,
    check_megatron,
    check_variables,
)
from pytest_megatron.doctor.checks.packages import check_compiled
from pytest_megatron.doctor.checks.project import Needs, check_project, check_recipe, read_needs
from pytest_megatron.doctor.facts import (
    EnvironmentFacts,
    Python,
    SystemView,
    compat,
    here,
)
from pytest_megatron.doctor.probes.machine import (
    SCRIPTS,
    ask,
    look_at_checkout,
    look_at_devices,
    look_at_machine,
    look_at_slurm,
    look_at_torch,
    try_collectives,
)
from pytest_megatron.doctor.probes.packages import find_megatrons, read_packages
from pytest_megatron.errors import HostError
from pytest_megatron.workloads.training.checks.rules import (
    CheckFinding,
    CheckRule,
    RuleMatch,
    check_rules,
    read_rules,
)
from pytest_megatron.workloads.training.checks.rules import finding_of as finding_in

_WIDTH = 110


def summary_of(facts: EnvironmentFacts) -> dict[str, str]:
    """Return the environment in a few lines: what -> which."""
    torch, devices = facts.torch, facts.devices
    names = ["megatron-core", *(n for row in compat().compiled for n in (row.name, *row.also))]
    there = [f"{name} {facts.packages[name].version}" for name in names if name in facts.packages]
    gpus = Counter(gpu.name for gpu in devices.gpus)
    found = {
        "python": f"{facts.python.version}, {facts.python.executable}",
        "torch": "none",
        "driver": devices.driver or "none",
        "GPUs": ", ".join(f"{n} x {name}" for name, n in gpus.items()) or f"{devices.num_nodes}",
        "packages": ", ".join(there) or "none that are compiled against torch",
        "host": facts.machine.container or "bare host",
        "slurm": ", ".join(facts.slurm.programs) or "no client",
        "network": ", ".join(facts.machine.interfaces) or "loopback only",
    }
    if torch is not None:
        parts = {"CUDA": torch.cuda, "NCCL": torch.nccl, "cuDNN": torch.cudnn}
        shown = [f"{name} {value}" for name, value in parts.items() if value]
        shown = shown or ["does not import" if torch.problem else "no CUDA"]
        found["torch"] = f"{torch.version} ({', '.join(shown)})"
    tried = [
        f"{one.world_size} ranks with {one.backend}: {'failed' if one.problem else 'right'}"
        for one in facts.collectives
    ]
    found["all_reduce"] = ", ".join(tried) or "not tried"
    return found


def _end(examination: Examination) -> str:
    return ", ".join(counted(examination.count(one), one.value) for one in Severity)


def _as_text(examination: Examination) -> str:
    """Return an examination as text."""
    summary = summary_of(examination.facts)
    width = max(map(len, summary))
    lines = [f"{name:<{width}}  {value}" for name, value in summary.items()]
    for finding in examination.findings:
        lines += ["", f"{finding.severity.value}: {_found(finding)} [{finding.rule.id}]"]
        lines += _indented(finding.wrong, "    ")
        lines += _indented(f"-> {finding.fix}", "    ", "       ")
        trouble = f"; known as: {finding.rule.trouble}" if finding.rule.trouble else ""
        lines += _indented(f"({finding.source}{trouble})", "    ", "     ")
    return "".join(f"{line}\n" for line in [*lines, "", _end(examination)])


def _found(finding: CheckFinding) -> str:
    return finding.found if finding.where is None else f"{finding.where}: {finding.found}"


def _indented(text: str, first: str, rest: str | None = None) -> list[str]:
    """Wrap a text to lines with an indent."""
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=first,
        subsequent_indent=first if rest is None else rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _finding_json(finding: CheckFinding) -> dict[str, JsonValue]:
    """Return a finding for machines."""
    return {
        "id": finding.rule.id,
        "severity": finding.severity.value,
        "group": finding.rule.group,
        "where": finding.where,
        "found": finding.found,
        "wrong": finding.wrong,
        "fix": finding.fix,
        "source": finding.source,
        "trouble": finding.rule.trouble,
        "values": dict(finding.values),
    }


def _as_json(examination: Examination) -> str:
    """Return an examination as JSON."""
    summary: dict[str, JsonValue] = dict(summary_of(examination.facts))
    value: dict[str, JsonValue] = {
        "environment": summary,
        "findings": [_finding_json(finding) for finding in examination.findings],
        "counts": {one.value: examination.count(one) for one in Severity},
    }
    return json.dumps(value, indent=1) + "\n"


FORMATS = {"text": _as_text, "json": _as_json}


@click.command(name="doctor")
@click.option(
    "--python",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="FILE",
    help="Of the environment to check (default: the one that runs this command).",
)
@click.option(
    "--for",
    "recipe",
    type=PATH,
    metavar="RECIPE",
    help="Check also what the rows of a recipe, or of a directory of recipes, need.",
)
@click.option("--platform", multiple=True, metavar="NAME", help="With --for: only these rows.")
@click.option("--no-collective", is_flag=True, help="Try no all_reduce.")
@click.option("--strict", is_flag=True, help="Exit with 1 if there are warnings.")
@format_option(*FORMATS)
def command(
    *,
    python: Path | None,
    recipe: Path | None,
    platform: tuple[str, ...],
    no_collective: bool,
    strict: bool,
    form: str,
) -> None:
    """Check driver, CUDA, torch, packages, network, limits and the project against one another.

    Run it where trainings are started. Exits with 2 if there are errors, with 1 if there are
    warnings and --strict is given, else with 0.
    """
    if platform and recipe is None:
        raise click.UsageError("--platform chooses rows of a recipe; give --for RECIPE too")
    needs = None if recipe is None else read_needs(recipe, Path.cwd(), platform)
    examination = examine(here(python), needs=needs, with_collective=not no_collective)
    click.echo(FORMATS[form](examination), nl=False)
    sys.exit(examination.exit_code(is_strict=strict))


_START_LIMIT_S = 30.0


def gather(system: SystemView, *, with_collective: bool = True) -> EnvironmentFacts:
    """Return everything that is known.

    Args:
        system: Where to look.
        with_collective: Whether to try all_reduces, if torch can be imported.

    Raises:
        HostError: The environment's Python does not run.
    """
    python = _python(system)
    packages = read_packages(python.paths)
    installed = [row for row in compat().compiled if {row.name, *row.also} & packages.keys()]
    modules = [module for row in installed for module in row.modules]
    facts = EnvironmentFacts(
        python=python,
        packages=packages,
        megatrons=find_megatrons(python.paths),
        torch=look_at_torch(system, packages.get("torch"), modules),
        devices=look_at_devices(system),
        machine=look_at_machine(system),
        slurm=look_at_slurm(system),
        git_fix=look_at_checkout(system),
    )
    if with_collective and facts.torch is not None and facts.torch.problem is None:
        num_gpus = facts.torch.count if facts.torch.cuda_problem is None else 0
        facts = replace(facts, collectives=tuple(try_collectives(system, num_gpus)))
    return facts


def _python(system: SystemView) -> Python:
    """Ask the Python that is examined for its version and paths."""
    answer = ask(
        system.python,
        SCRIPTS / "environment.py",
        limit_s=_START_LIMIT_S,
        env=system.env,
        cwd=system.project,
    )
    if answer.problem is not None or "tag" not in answer.values:
        raise HostError(
            str(system.python),
            f"{answer.problem or 'says nothing of itself'}, expected the Python of an environment",
        )
    return trusted(Python, answer.values)


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
    system: SystemView, *, needs: Needs | None = None, with_collective: bool = True
) -> Examination:
    """Gather facts and check them.

    Raises:
        HostError: The environment's Python does not run.
    """
    facts = gather(system, with_collective=with_collective)
    order = list(rules())
    findings = [finding_of(hit) for hit in check(facts, system, needs)]
    findings.sort(key=lambda finding: order.index(finding.rule.id))
    return Examination(facts=facts, findings=tuple(findings))


def check(
    facts: EnvironmentFacts, system: SystemView, needs: Needs | None = None
) -> Iterator[RuleMatch]:
    """Yield everything that is wrong."""
    yield from check_cuda(facts, system.env)
    yield from check_torch(facts, system.env)
    yield from check_compiled(facts)
    yield from check_megatron(facts)
    yield from check_communication(facts)
    yield from check_variables(system.env)
    yield from check_machine(facts)
    yield from check_project(facts, system)
    if needs is not None:
        yield from check_recipe(facts, system, needs)

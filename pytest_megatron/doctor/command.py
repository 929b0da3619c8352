"""`pytest-megatron doctor`: problems of this machine and this environment."""

from __future__ import annotations

import itertools
import json
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import click

from pytest_megatron.base.command import PATH, format_option
from pytest_megatron.base.files import JsonValue
from pytest_megatron.base.findings import Severity
from pytest_megatron.base.templates import render
from pytest_megatron.base.text import counted
from pytest_megatron.doctor.checks.project import read_needs
from pytest_megatron.doctor.examine import Examination, examine
from pytest_megatron.doctor.facts import UNKNOWN, EnvironmentFacts, Slurm, compat, here
from pytest_megatron.workloads.training.checks.rules import CheckFinding, as_json

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
        "slurm": _slurm_line(facts.slurm),
        "network": ", ".join(facts.machine.interfaces) or "loopback only",
    }
    if torch is not None:
        parts = {"CUDA": torch.cuda, "NCCL": torch.nccl, "cuDNN": torch.cudnn}
        shown = [f"{name} {value}" for name, value in parts.items() if value] or ["no CUDA"]
        found["torch"] = f"{torch.version} ({', '.join(shown)})"
    tried = [
        f"{one.world_size} ranks with {one.backend}: {'failed' if one.problem else 'right'}"
        for one in facts.collectives
    ]
    found["all_reduce"] = ", ".join(tried) or "not tried"
    return found


def _slurm_line(slurm: Slurm) -> str:
    versions = set(slurm.programs.values())
    return ", ".join(sorted(versions - {UNKNOWN} or versions)) or "no client"


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
        lines += _indented(f"-> {finding.mend}", "    ", "       ")
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


def _as_json(examination: Examination) -> str:
    """Return an examination as JSON."""
    summary: dict[str, JsonValue] = dict(summary_of(examination.facts))
    value: dict[str, JsonValue] = {
        "environment": summary,
        "findings": [as_json(finding) for finding in examination.findings],
        "counts": {one.value: examination.count(one) for one in Severity},
    }
    return json.dumps(value, indent=1) + "\n"


def _as_markdown(examination: Examination) -> str:
    """Return an examination as Markdown."""
    groups = itertools.groupby(examination.findings, key=lambda finding: finding.rule.group)
    return render(
        "doctor.md",
        summary=summary_of(examination.facts),
        counts=_end(examination),
        groups=[(group, list(findings)) for group, findings in groups],
    )


FORMATS: Mapping[str, Callable[[Examination], str]] = {
    "text": _as_text,
    "json": _as_json,
    "markdown": _as_markdown,
}


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

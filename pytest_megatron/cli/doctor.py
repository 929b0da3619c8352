"""`pytest-megatron doctor`: problems of this machine and this environment."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from pytest_megatron.cli.formats import PATH, format_option
from pytest_megatron.doctor.checks.recipe import read_needs
from pytest_megatron.doctor.examine import examine
from pytest_megatron.doctor.report import FORMATS
from pytest_megatron.doctor.system import here


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

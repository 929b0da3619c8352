"""`pytest-megatron golden lint`: errors of golden files."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from pytest_megatron.base.command import PATH, findings_option, findings_text, root_option
from pytest_megatron.base.text import counted, printable
from pytest_megatron.workloads.golden.lint import Project, lint_goldens
from pytest_megatron.workloads.recipe.load import default_recipes
from pytest_megatron.workloads.recipe.model import project_words


@click.command("lint")
@click.argument("paths", metavar="[PATH]...", nargs=-1, type=PATH)
@root_option
@click.option(
    "--recipes",
    type=PATH,
    multiple=True,
    help="Recipe, or directory of recipes, whose rows read the goldens (repeatable).  "
    "[default: recipes or tests/test_utils/recipes in the root]",
)
@findings_option
def lint(paths: tuple[Path, ...], root: Path, recipes: tuple[Path, ...], form: str) -> None:
    """Report errors in goldens.

    PATH is a golden or a directory of goldens; by default all of the project. Exits with 1 if a
    finding is an error, with 0 if there are none or only warnings, with 2 if a path does not
    exist.
    """
    default = default_recipes(root)
    project = Project(
        root=root,
        recipes=recipes or ((default,) if default.is_dir() else ()),
        vocabulary=project_words(root),
    )
    report = lint_goldens(paths, project)
    click.echo(printable(findings_text(report.findings, form)), nl=False)
    if form == "text":
        reached = f"{report.num_read} of them read by a row" if project.recipes else "no recipes"
        click.echo(f"{counted(report.num_goldens, 'golden')}; {reached}")
    if report.num_broken:
        broken = f"{counted(report.num_broken, 'recipe')} with errors, see pytest-megatron lint"
        click.echo(f"{broken}; so no golden is named as unreachable", err=True)
    sys.exit(any(finding.is_error for finding in report.findings))

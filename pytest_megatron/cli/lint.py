"""`pytest-megatron lint`: what is wrong in recipes, cases and goldens."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from pytest_megatron.base.project import load_config
from pytest_megatron.cli.findings import FORMATS, findings_option
from pytest_megatron.cli.formats import PATH, root_option
from pytest_megatron.recipe.lint import lint
from pytest_megatron.recipe.load import project_words
from pytest_megatron.workload.checks.check import lint_checks


@click.command(name="lint")
@click.argument("paths", metavar="[PATH]...", nargs=-1, type=PATH)
@root_option
@findings_option
def command(paths: tuple[Path, ...], root: Path, form: str) -> None:
    """Report what is wrong in recipes, their test cases and goldens.

    PATH is a recipe or a directory of recipes; by default recipes/. Exits with 1 if a finding is
    an error, with 0 if there are none or only warnings, with 2 if a path does not exist.
    """
    findings = lint(
        paths or (Path("recipes"),),
        root=root,
        vocabulary=project_words(root),
        other_names=load_config(root).golden_platforms,
        row_checks=[lint_checks],
    )
    click.echo(FORMATS[form](findings), nl=False)
    sys.exit(any(finding.is_error for finding in findings))

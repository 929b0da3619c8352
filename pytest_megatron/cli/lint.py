"""`pytest-megatron lint`: what is wrong in recipes, cases and goldens."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from pytest_megatron.cli.findings import FORMATS
from pytest_megatron.config import load_config
from pytest_megatron.recipe.lint import lint
from pytest_megatron.recipe.load import project_words


@click.command(name="lint")
@click.argument("paths", metavar="[PATH]...", nargs=-1, type=click.Path(path_type=Path))
@click.option(
    "--root",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    default=Path(),
    help="Directory with the test cases and golden values (default: the current one).",
)
@click.option(
    "--format",
    "style",
    type=click.Choice(["text", "json", "github"]),
    default="text",
    show_default=True,
    help="github prints workflow commands, which annotate a pull request.",
)
def command(paths: tuple[Path, ...], root: Path, style: str) -> None:
    """Report what is wrong in recipes, their test cases and goldens.

    PATH is a recipe or a directory of recipes; by default recipes/. Exits with 1 if a finding is
    an error, with 0 if there are none or only warnings, with 2 if a path does not exist.
    """
    findings = lint(
        paths or (Path("recipes"),),
        root=root,
        vocabulary=project_words(root),
        other_names=load_config(root).golden_platforms,
    )
    click.echo(FORMATS[style](findings), nl=False)
    sys.exit(any(finding.is_error for finding in findings))

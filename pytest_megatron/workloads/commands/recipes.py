"""`pytest-megatron expand` and `lint`: rows of recipes, their errors, their JSON Schemas."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from pytest_megatron.base.command import (
    EXIT_UNUSABLE,
    PATH,
    echo_error,
    findings_option,
    findings_text,
    format_option,
    root_option,
)
from pytest_megatron.base.files import JsonValue
from pytest_megatron.base.text import counted, nodes_by_ranks
from pytest_megatron.workloads.recipe.expand import Profile
from pytest_megatron.workloads.recipe.lint import lint_recipes
from pytest_megatron.workloads.recipe.load import Loaded, default_recipes, find_recipes, read_recipe
from pytest_megatron.workloads.recipe.model import project_words


@click.command(name="expand")
@click.argument("recipes", nargs=-1, required=True, type=PATH)
@click.option(
    "--profile",
    type=click.Choice([profile.value for profile in Profile]),
    default=Profile.STRICT.value,
    show_default=True,
    help="strict reports what Megatron-LM's parser drops or mangles; compat does as it does.",
)
@format_option("text", "json", about="json holds every key of a row.")
def expand(recipes: tuple[Path, ...], profile: str, form: str) -> None:
    """Print the workloads of recipe files, and of the recipes in directories.

    A recipe with an error has one line for each, and no rows; the others have theirs. Exits with 2
    then.
    """
    words = project_words(Path.cwd())
    files = [file for path in recipes for file in find_recipes([path])]
    loaded = [read_recipe(file, Profile(profile), words) for file in files]
    for error in (error for one in loaded for error in one.errors):
        echo_error(error)
    sound = [one for one in loaded if not one.errors]
    num_broken = len(loaded) - len(sound)
    click.echo(_as_json(sound) if form == "json" else _as_text(sound, num_broken), nl=False)
    sys.exit(EXIT_UNUSABLE if num_broken else 0)


def _as_json(loaded: list[Loaded]) -> str:
    """Return rows as JSON."""
    rows: list[JsonValue] = [
        {"file": str(workload.file), "spec": dict(workload.spec)}
        for one in loaded
        for workload in one.workloads
    ]
    return json.dumps(rows, indent=1) + "\n"


def _as_text(loaded: list[Loaded], num_broken: int) -> str:
    """Return rows as lines."""
    lines = [
        f"{workload.file}::{workload.item_name}  "
        f"{workload.model} {workload.scope} {','.join(workload.cadence)} "
        f"{nodes_by_ranks(workload.nodes, workload.gpus)}"
        for one in loaded
        for workload in one.workloads
    ]
    total = counted(len(lines), "workload")
    if num_broken:
        total += f", without those of {counted(num_broken, 'recipe')} with errors"
    return "".join(f"{line}\n" for line in [*lines, total])


# Files that have a JSON Schema in the package.
SCHEMAS = ("case", "ci", "executor-config", "golden", "policy", "recipe", "run")


def schema_path(name: str) -> Path:
    """Return the file of a JSON Schema."""
    return Path(__file__).parents[2] / "schemas" / f"{name}.schema.json"


@click.command(name="lint")
@click.argument("paths", metavar="[PATH]...", nargs=-1, type=PATH)
@root_option
@findings_option
@click.option(
    "--schema",
    type=click.Choice(list(SCHEMAS)),
    help="Print where the JSON Schema of such files is, and check nothing.",
)
def lint(paths: tuple[Path, ...], root: Path, form: str, schema: str | None) -> None:
    """Report errors in recipes, their test cases and goldens.

    PATH is a recipe or a directory of recipes; by default the project's. Exits with 1 if a finding
    is an error, with 0 if there are none or only warnings, with 2 if a path does not exist.
    """
    if schema is not None:
        click.echo(schema_path(schema))
        return
    from pytest_megatron.workloads.training.checks.check import lint_row  # noqa: PLC0415 - slow to import

    findings = lint_recipes(
        paths or (default_recipes(root),),
        root=root,
        vocabulary=project_words(root),
        check=lint_row,
    )
    click.echo(findings_text(findings, form), nl=False)
    sys.exit(any(finding.is_error for finding in findings))

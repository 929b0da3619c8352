"""`pytest-megatron schema`: the JSON Schemas of files, for editors and other tools."""

from __future__ import annotations

from pathlib import Path

import click

# Name -> the files that it is for, as an editor takes them.
SCHEMAS = {
    "case": "tests/functional_tests/test_cases/**/model_config.yaml",
    "ci": "[tool.pytest-megatron.ci] of pyproject.toml",
    "executor-config": "the file of --executor-config",
    "golden": "golden_values*.json",
    "policy": "the file of --golden-policy",
    "recipe": "recipes/**/*.yaml",
    "run": "run.json of a run directory",
}


def schema_path(name: str) -> Path:
    """Return the file of a schema."""
    return Path(__file__).parents[1] / "schemas" / f"{name}.schema.json"


@click.command()
@click.argument("name", type=click.Choice(list(SCHEMAS)), required=False)
@click.option("--path", "is_path", is_flag=True, help="Print where the file is.")
def command(name: str | None, *, is_path: bool) -> None:
    """Print a JSON Schema, or without NAME their names, files and paths."""
    if name is None:
        width = max(map(len, SCHEMAS))
        for each, files in SCHEMAS.items():
            click.echo(f"{each:{width}}  {files}\n{'':{width}}  {schema_path(each)}")
    elif is_path:
        click.echo(schema_path(name))
    else:
        click.echo(schema_path(name).read_text(encoding="utf-8"), nl=False)

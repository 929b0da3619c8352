"""`pytest-megatron triage`: why a run failed, from its logs."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from pytest_megatron.base.project import load_config
from pytest_megatron.base.text import printable
from pytest_megatron.cli.formats import EXIT_FAILED, PATH, echo_json, format_option
from pytest_megatron.triage.api import triage
from pytest_megatron.triage.render import as_markdown, as_text
from pytest_megatron.triage.signatures import check_rules, load_table

EXIT_UNKNOWN = 3
CHECK = "check-rules"


@click.command(name="triage")
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, type=PATH)
@format_option("text", "json", "markdown")
@click.option(
    "--signatures",
    "files",
    multiple=True,
    metavar="FILE",
    type=PATH,
    help="A TOML file with signatures of your own (repeatable).",
)
def command(*, paths: tuple[Path, ...], form: str, files: tuple[Path, ...]) -> None:
    """Find why a run failed: files, directories, zip and tar artifacts.

    PATH check-rules tries the examples of every signature instead.

    Exit code 0: nothing failed, as a good end shows. 1: a failure was found. 2: the input is
    unusable. 3: neither a failure nor a good end is to be seen.
    """
    own = (*load_config(Path()).signature_files, *files)
    if paths == (Path(CHECK),) and not paths[0].exists():
        _check_rules(own)
        return
    found = triage(paths, load_table(own))
    if form == "json":
        echo_json(found.as_json())
    else:
        click.echo(printable(as_text(found) if form == "text" else as_markdown(found)))
    sys.exit(EXIT_FAILED if found.groups else EXIT_UNKNOWN if found.unclear else 0)


def _check_rules(own: tuple[Path, ...]) -> None:
    """Try the examples of every signature, and end with exit code 1 if one does not fit."""
    table = load_table(own)
    problems = check_rules(table)
    for problem in problems:
        click.echo(f"{problem.signature.id}: {problem.example!r}: {problem.problem}")
    num_examples = sum(len(row.examples) + len(row.counterexamples) for row in table.signatures)
    verdict = f"{len(problems)} do not fit" if problems else "all fit"
    click.echo(f"{len(table.signatures)} signatures, {num_examples} examples: {verdict}")
    sys.exit(EXIT_FAILED if problems else 0)

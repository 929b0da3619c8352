"""`pytest-megatron triage`: why a run failed, from its logs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click

from pytest_megatron.base.command import EXIT_FAILED, PATH, echo_json, format_option
from pytest_megatron.base.project import load_config
from pytest_megatron.base.text import counted, listed, printable
from pytest_megatron.triage.api import FailureGroup, Triage, Unclear, triage
from pytest_megatron.triage.signatures import check_rules, load_table

_INDENT = "    "
_MOST_LISTED = 5


def as_text(found: Triage) -> str:
    """Return a paragraph for each cause, with its evidence and what to do."""
    blocks = ["\n".join(_text_block(group)) for group in found.groups]
    blocks += ["\n".join(_unclear_block(unclear)) for unclear in found.unclear[:_MOST_LISTED]]
    if not blocks:
        lines = [f"nothing failed in {_launches(found.num_units)}"]
        return "\n".join([*lines, *_notes(found)])
    return "\n\n".join([*blocks, *_notes(found)])


def _text_block(group: FailureGroup) -> Iterator[str]:
    """Yield the lines of failures with one cause."""
    first = group.first
    yield f"{first.unit}: {first.family}"
    yield f"{_INDENT}{first.text}"
    for evidence in first.evidence:
        yield f"{_INDENT}{evidence.file}:{evidence.line}: {evidence.text}"
    yield f"{_INDENT}{first.reason}"
    yield f"{_INDENT}known as {first.signature}: {_advice(group)}"
    if first.next is not None:
        yield f"{_INDENT}next: {first.next}"
    if also := _also(group):
        yield f"{_INDENT}{also}"


def _unclear_block(unclear: Unclear) -> Iterator[str]:
    """Yield the lines of a launch that shows neither failure nor good end."""
    yield f"{unclear.unit}: unknown"
    yield f"{_INDENT}{unclear.text}"
    for evidence in unclear.last_words:
        yield f"{_INDENT}{evidence.file}:{evidence.line}: {evidence.text}"


def _advice(group: FailureGroup) -> str:
    first = group.first
    return f"{first.advice} ({first.source})" if first.source is not None else f"{first.advice}"


def _also(group: FailureGroup) -> str:
    others = [diagnosis.unit for diagnosis in group.diagnoses[1:]]
    return f"the same in {listed(others, _MOST_LISTED)}" if others else ""


def _notes(found: Triage) -> list[str]:
    """Return notes, and how many launches are not shown."""
    notes = [f"note: {note}" for note in found.notes]
    if len(found.unclear) > _MOST_LISTED:
        rest = len(found.unclear) - _MOST_LISTED
        notes.append(f"note: {_launches(rest)} more show neither a failure nor a good end")
    return notes


def _launches(number: int) -> str:
    return counted(number, "launch", "launches")


EXIT_UNKNOWN = 3
CHECK = "check-rules"


@click.command(name="triage")
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, type=PATH)
@format_option("text", "json")
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
        click.echo(printable(as_text(found)))
    sys.exit(EXIT_FAILED if found.groups else EXIT_UNKNOWN if found.unclear else 0)


def _check_rules(own: tuple[Path, ...]) -> None:
    """Try every signature and its examples, and end with exit code 1 if one does not fit."""
    table = load_table(own)
    problems = check_rules(table)
    for problem in problems:
        where = f"{problem.example!r}: " if problem.example else ""
        click.echo(f"{problem.signature.id}: {where}{problem.problem}")
    num_examples = sum(len(row.examples) + len(row.counterexamples) for row in table.signatures)
    verdict = f"{len(problems)} do not fit" if problems else "all fit"
    signatures = counted(len(table.signatures), "signature")
    click.echo(f"{signatures}, {counted(num_examples, 'example')}: {verdict}")
    sys.exit(EXIT_FAILED if problems else 0)

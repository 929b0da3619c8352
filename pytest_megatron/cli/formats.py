"""Options, exit codes and output formats that several commands share."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import click

from pytest_megatron.base.text import counted, printable, workflow_command

if TYPE_CHECKING:
    from pytest_megatron.base.files import JsonValue
    from pytest_megatron.recipe.findings import Finding

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

EXIT_FAILED = 1
EXIT_UNUSABLE = 2
PATH = click.Path(path_type=Path)
root_option = click.option(
    "--root",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    default=Path(),
    help="The project.  [default: the current directory]",
)


def format_option(
    *forms: str, about: str | None = None
) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result]]:
    """Return a decorator that adds `--format`, handed over as `form`; text is the default.

    Args:
        forms: The choices in the order in which the help lists them; one of them is text.
        about: Text of the help.
    """
    return click.option(
        "--format",
        "form",
        type=click.Choice(forms),
        default="text",
        show_default=True,
        help=about,
    )


def echo_error(problem: object) -> None:
    """Print a problem as one line on stderr."""
    click.echo(printable(f"pytest-megatron: {problem}"), err=True)


def echo_json(value: JsonValue) -> None:
    """Print a value as indented JSON."""
    click.echo(json.dumps(value, indent=2, allow_nan=False))


findings_option = format_option(
    *("text", "json", "github"),
    about="github prints workflow commands, which annotate a pull request.",
)


def findings_text(findings: Sequence[Finding], form: str) -> str:
    """Return findings of a lint command as text, JSON or commands of a GitHub workflow."""
    return _FINDINGS[form](findings)


def _as_text(findings: Sequence[Finding]) -> str:
    lines = [
        f"{found.where}: {found.severity.value}: {found.message} [{found.rule}]"
        for found in findings
    ]
    num_errors = sum(finding.is_error for finding in findings)
    num_notes = sum(finding.severity.value == "note" for finding in findings)
    num_warnings = len(findings) - num_errors - num_notes
    lines.append(f"{counted(num_errors, 'error')}, {counted(num_warnings, 'warning')}")
    return "".join(f"{line}\n" for line in lines)


def _as_json(findings: Sequence[Finding]) -> str:
    rows: list[JsonValue] = [
        {
            "file": str(found.file),
            "line": found.line,
            "severity": found.severity.value,
            "rule": found.rule,
            "message": found.message,
        }
        for found in findings
    ]
    return json.dumps(rows, indent=1) + "\n"


def _as_github(findings: Sequence[Finding]) -> str:
    lines = []
    for found in findings:
        places = {"file": str(found.file), "line": found.line, "title": found.rule}
        command = found.severity.value.replace("note", "notice")
        lines.append(workflow_command(command, places, found.message))
    return "".join(f"{line}\n" for line in lines)


_FINDINGS = {"text": _as_text, "json": _as_json, "github": _as_github}

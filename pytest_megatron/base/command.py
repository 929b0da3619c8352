"""Groups, options, exit codes and output formats that several commands share."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, ParamSpec, TypeVar

import click
from click.shell_completion import CompletionItem
from typing_extensions import override

from pytest_megatron.base.text import counted, nearest, printable, workflow_command
from pytest_megatron.errors import REMOVED, MegatronError
from pytest_megatron.features import load

if TYPE_CHECKING:
    from pytest_megatron.base.files import JsonValue
    from pytest_megatron.base.findings import Finding

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
    """Return findings as lines for people."""
    lines = [
        f"{found.where}: {found.severity.value}: {found.message} [{found.rule}]"
        for found in findings
    ]
    num_errors = sum(finding.is_error for finding in findings)
    num_warnings = len(findings) - num_errors
    lines.append(f"{counted(num_errors, 'error')}, {counted(num_warnings, 'warning')}")
    return "".join(f"{line}\n" for line in lines)


def _as_json(findings: Sequence[Finding]) -> str:
    """Return findings as JSON."""
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
    """Return findings as annotations of GitHub."""
    lines = []
    for found in findings:
        places = {"file": str(found.file), "line": found.line, "title": found.rule}
        lines.append(workflow_command(found.severity.value, places, found.message))
    return "".join(f"{line}\n" for line in lines)


_FINDINGS = {"text": _as_text, "json": _as_json, "github": _as_github}


class HintingGroup(click.Group):
    """A group that names the command which looks most like a wrong word."""

    @override
    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command of a word; an unknown one is an error with the nearest.

        Raises:
            MegatronError: The command is one of earlier versions.
        """
        is_word = not args[0].startswith("-") and not ctx.resilient_parsing
        if is_word and self.get_command(ctx, args[0]) is None:
            _, *groups = ctx.command_path.split()
            words = " ".join((*groups, args[0]))
            if words in REMOVED:
                raise MegatronError(words, REMOVED[words])
            hint = nearest(args[0], self.list_commands(ctx))
            ctx.fail(f"No such command {args[0]!r}{hint or '.'}")
        return super().resolve_command(ctx, args)


class LazyGroup(HintingGroup):
    """A group whose commands are imported on first use, so that `--help` stays fast.

    Attributes:
        lazy: Name to `module:command`, the module below `pytest_megatron`, and one line of help.
    """

    lazy: ClassVar[Mapping[str, tuple[str, str]]] = {}

    @override
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*self.lazy, *self.commands})

    @override
    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.lazy:
            return super().get_command(ctx, cmd_name)
        command = load(self.lazy[cmd_name][0])
        assert isinstance(command, click.Command)
        return command

    @override
    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(self._texts())

    @override
    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[str]]:
        found = [(name, text) for name, text in self._texts() if name.startswith(incomplete)]
        options = click.Command.shell_complete(self, ctx, incomplete)
        return [*(CompletionItem(name, help=text) for name, text in found), *options]

    def _texts(self) -> list[tuple[str, str]]:
        """Return the names of the commands with their line of help, sorted."""
        own = {name: command.get_short_help_str() for name, command in self.commands.items()}
        return sorted({**own, **{name: text for name, (_, text) in self.lazy.items()}}.items())

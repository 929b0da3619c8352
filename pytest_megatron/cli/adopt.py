"""`pytest-megatron adopt`: what to type for the launched tests of a project."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from pytest_megatron.adopt.advise import advice_lines, advise, as_json, typed_lines
from pytest_megatron.adopt.find import LOOKED_FOR, Inventory, search
from pytest_megatron.adopt.prove import (
    ComparedFile,
    file_line,
    heading,
    is_proved,
    plan_proofs,
    proof_lines,
    prove,
)
from pytest_megatron.adopt.settings import (
    ConfigChange,
    apply_changes,
    diff_of,
    installed_source,
    plan_changes,
)
from pytest_megatron.base.text import counted
from pytest_megatron.cli.formats import EXIT_FAILED, echo_error, echo_json, format_option
from pytest_megatron.errors import AdoptError

_MOST_LISTED = 20


@click.command("adopt")
@click.argument(
    "root",
    metavar="[PATH]",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    default=Path(),
)
@click.option("--dry-run", is_flag=True, help="Print the diff and write nothing.")
@click.option("--prove", "is_proving", is_flag=True, help="Compare outcomes; write nothing.")
@click.option(
    "--tests",
    multiple=True,
    metavar="PATH",
    help="With --prove: these tests, instead of those of the commands that were found.",
)
@click.option(
    "--ranks",
    type=click.IntRange(min=1),
    metavar="N",
    help="With --prove: the number of ranks.  [default: of each command, at most one a CPU]",
)
@click.option(
    "--time-limit",
    type=click.FloatRange(min=1),
    default=900,
    show_default=True,
    metavar="S",
    help="With --prove: begin no further file after that.",
)
@click.option("--all", "is_all", is_flag=True, help="List every place, not 20 of a kind.")
@format_option("text", "json")
def command(  # noqa: PLR0913  an option each
    *,
    root: Path,
    dry_run: bool,
    is_proving: bool,
    tests: tuple[str, ...],
    ranks: int | None,
    time_limit: float,
    is_all: bool,
    form: str,
) -> None:
    """Find how a project starts distributed tests, and change it to pytest-megatron.

    Reads scripts, Makefiles, steps of CI, tests and recipes below PATH, and runs nothing. Writes
    pytest's configuration and a workflow, but only to files that git can give back.

    Exit code 1: nothing was found, a file was not written, or an outcome differs.
    """
    if (tests or ranks) and not is_proving:
        raise click.UsageError("--tests and --ranks are for --prove; give it too")
    inventory = search(root)
    advice = [advise(place, inventory) for place in inventory.findings]
    for problem in inventory.unread:
        echo_error(f"not read: {problem}")
    if inventory.is_cut:
        echo_error(f"{root}: stopped after the time limit; give a part of it as PATH")
    if is_proving:
        sys.exit(_prove(root, inventory, tests, ranks, time_limit))
    if form == "json":
        echo_json({"num_files": inventory.num_files, "places": as_json(advice)})
        sys.exit(0 if advice else EXIT_FAILED)
    if not advice:
        echo_error(f"{root}: nothing found in {counted(inventory.num_files, 'file')}; {LOOKED_FOR}")
        sys.exit(EXIT_FAILED)
    most = None if is_all else _MOST_LISTED
    for line in advice_lines(advice, inventory, most=most):
        click.echo(line)
    changes = plan_changes(root, inventory, installed_source())
    click.echo()
    click.echo(diff_of(changes.files), nl=False)
    for line in (*changes.notes, *(typed_lines(advice, most=most) if changes.files else ())):
        click.echo(line)
    sys.exit(0 if dry_run else _write(root, changes.files))


def _write(root: Path, files: Sequence[ConfigChange]) -> int:
    """Write the files that git can give back, and return the exit code."""
    refused = apply_changes(root, files)
    written = len(files) - len(refused)
    click.echo(f"wrote {counted(written, 'file')}" if files else "nothing to write")
    for problem in refused:
        echo_error(problem)
    return EXIT_FAILED if refused else 0


def _prove(
    root: Path, inventory: Inventory, tests: tuple[str, ...], ranks: int | None, limit_s: float
) -> int:
    """Run tests under both, print the comparison and return the exit code."""
    for module in ("torch", "pytest"):
        if importlib.util.find_spec(module) is None:
            raise AdoptError("--prove", f"needs {module} in the environment of this command")
    plans, problems = plan_proofs(root, inventory, tests, ranks)
    for problem in problems:
        click.echo(problem)
    if not plans:
        raise AdoptError(
            "--prove", "no command that was found can run here; name tests with --tests PATH"
        )
    for plan in plans:
        click.echo(heading(plan))

    def report(done: ComparedFile) -> None:
        click.echo(file_line(done))

    compared, untried = prove(root, plans, limit_s=limit_s, report=report)
    for line in proof_lines(compared, untried):
        click.echo(line)
    return 0 if is_proved(compared) else EXIT_FAILED

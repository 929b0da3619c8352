"""`pytest-megatron golden accept`: goldens out of finished runs, under the gate of a refresh.

Thin: opens runs, asks `refresh/` and prints. Also what `golden review` shares with it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ParamSpec

import click

from pytest_megatron.base.text import printable
from pytest_megatron.cli.formats import PATH, format_option, root_option
from pytest_megatron.errors import GoldenError
from pytest_megatron.golden.policy import policy_named
from pytest_megatron.refresh.accept import AcceptOutcome, Terms, accept, write_pages
from pytest_megatron.refresh.candidate import Candidate
from pytest_megatron.refresh.pull_request import commit_message, refusals_text
from pytest_megatron.refresh.sources import open_runs, read_candidates, select
from pytest_megatron.refresh.text import FORMS, outcome_text
from pytest_megatron.runs.layout import OWN_DIR, make_own_dir

EXIT_REFUSED = 1
_Arguments = ParamSpec("_Arguments")


def shared_options(function: Callable[_Arguments, None]) -> Callable[_Arguments, None]:
    """Add the options that select candidates and set the terms."""
    for option in reversed(
        (
            click.option(
                "--only",
                multiple=True,
                metavar="ITEM",
                help="Only this workload: a node id, part of one, or a pattern (repeatable).",
            ),
            click.option("--reason", metavar="TEXT", help="Why goldens change; they say it."),
            click.option("--allow-dirty", is_flag=True, help="Also from a tree without a commit."),
            click.option("--golden-policy", default="strict", show_default=True, metavar="NAME"),
            root_option,
            format_option(*FORMS),
        )
    ):
        function = option(function)
    return function


@click.command("accept")
@click.argument("runs", nargs=-1, required=True, metavar="RUN|ARTIFACT...", type=PATH)
@click.option("--dry-run", "is_dry", is_flag=True, help="Judge and show, write nothing.")
@shared_options
def command(  # noqa: PLR0913 - click hands over one argument an option
    *,
    runs: tuple[Path, ...],
    is_dry: bool,
    only: tuple[str, ...],
    reason: str | None,
    allow_dirty: bool,
    golden_policy: str,
    root: Path,
    form: str,
) -> None:
    """Write what finished runs measured as goldens: all of it, or nothing.

    A run directory, a directory with several, or an artifact of one (zip, tar). Workloads that
    agreed with their goldens are left alone; each other one must have been trained to the end,
    cleanly and at least twice.

    Exit code 0: written, or nothing differs. 1: something is refused, and nothing is written.
    """
    terms = Terms(reason=clean_reason(reason), is_dirty_allowed=allow_dirty)
    with open_runs(runs) as found:
        candidates = select(
            read_candidates(found, root, policy_named(golden_policy, root=root)), only
        )
        outcome = write(candidates, root, terms, is_dry=is_dry)
    report(outcome, pages_directory(runs, root), terms, form=form, is_dry=is_dry)


def clean_reason(reason: str | None) -> str | None:
    """Return a reason in one line, None for an empty one."""
    return " ".join((reason or "").split()) or None


def write(
    candidates: Sequence[Candidate], root: Path, terms: Terms, *, is_dry: bool = False
) -> AcceptOutcome:
    """Accept candidates.

    Raises:
        GoldenError: They cannot be written; every golden is as it was.
    """
    try:
        return accept(candidates, root, terms, is_dry=is_dry)
    except OSError as error:
        where = str(error.filename or root)
        raise GoldenError(
            where, f"{error.strerror}; no golden was changed; make room, or make it writable"
        ) from error


def pages_directory(runs: Sequence[Path], root: Path) -> Path:
    """Return where page and commit message go: into the one run, else into our own directory."""
    if len(runs) == 1 and runs[0].is_dir():
        return runs[0]
    return root / OWN_DIR


def report(
    outcome: AcceptOutcome, pages: Path, terms: Terms, *, form: str, is_dry: bool = False
) -> None:
    """Print what became of a set, write its pages, and end with 1 if it was refused."""
    if form == "json" or outcome.differences:
        click.echo(printable(outcome_text(outcome, form, reason=terms.reason)))
    if outcome.refused:
        _refuse(outcome)
    if not outcome.differences:
        click.echo("nothing to accept: no workload left a candidate", err=form == "json")
    elif is_dry:
        click.echo(f"{len(outcome.differences)} would be written (--dry-run)", err=form == "json")
    elif outcome.is_written:
        _tell_written(outcome, pages, terms, is_error=form == "json")


def _refuse(outcome: AcceptOutcome) -> None:
    for line in refusals_text(outcome.refused):
        click.echo(f"refused: {line}", err=True)
    soft = all(refusal.rule.is_soft for _, refusal in outcome.refused)
    way = "give --reason TEXT" if soft else "run these again, or name the others with --only"
    click.echo(f"nothing was written; {way}", err=True)
    sys.exit(EXIT_REFUSED)


def _tell_written(outcome: AcceptOutcome, pages: Path, terms: Terms, *, is_error: bool) -> None:
    click.echo(f"{len(outcome.differences)} written", err=is_error)
    try:
        if pages.name == OWN_DIR.name:
            make_own_dir(pages.parent)
        page, message = write_pages(pages, outcome, terms.reason)
    except OSError as error:
        click.echo(f"no page: {error.filename or pages}: {error.strerror}", err=True)
        return
    click.echo(f"for the pull request: {page}", err=is_error)
    click.echo(f"for the commit: git add golden_values && git commit -F {message}\n", err=is_error)
    click.echo(commit_message(outcome.differences, reason=terms.reason), nl=False, err=is_error)

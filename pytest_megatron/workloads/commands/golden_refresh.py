"""`pytest-megatron golden accept`: goldens of finished runs, under a gate.

Thin: opens runs, asks `workloads/refresh/` and prints.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePath

import click

from pytest_megatron.base.command import EXIT_FAILED, PATH, root_option
from pytest_megatron.base.project import SHORT_COMMIT, ask_git
from pytest_megatron.base.text import plain, printable
from pytest_megatron.errors import GoldenError
from pytest_megatron.runs.find import find_runs
from pytest_megatron.runs.layout import COMPARISON_FILE, PLAN_FILE
from pytest_megatron.runs.record import read_run as read_run_file
from pytest_megatron.workloads.golden.policy import policy_named
from pytest_megatron.workloads.refresh.gate import Candidate
from pytest_megatron.workloads.refresh.read import CANDIDATE, read_run
from pytest_megatron.workloads.refresh.report import differences_text
from pytest_megatron.workloads.refresh.write import AcceptOutcome, Terms
from pytest_megatron.workloads.refresh.write import accept as accept_candidates

_WANTED = (
    *(CANDIDATE, PLAN_FILE, COMPARISON_FILE, "metrics.json", "metrics.jsonl"),
    "generated.json",
)
_SKIPPED = ("checkpoints", "data_cache", "frozen_checkpoint", "project")


@click.command("accept")
@click.argument("runs", nargs=-1, required=True, metavar="RUN|ARTIFACT...", type=PATH)
@click.option("--dry-run", "is_dry", is_flag=True, help="Judge and show, write nothing.")
@click.option(
    "--only",
    multiple=True,
    metavar="ITEM",
    help="Only this workload: a node id, part of one, or a pattern (repeatable).",
)
@click.option("--reason", metavar="TEXT", help="Why goldens change; they say it.")
@click.option("--allow-dirty", is_flag=True, help="Also from a tree without a commit.")
@click.option("--golden-policy", default="strict", show_default=True, metavar="NAME")
@root_option
def accept(  # noqa: PLR0913 - click hands over one argument an option
    *,
    runs: tuple[Path, ...],
    is_dry: bool,
    only: tuple[str, ...],
    reason: str | None,
    allow_dirty: bool,
    golden_policy: str,
    root: Path,
) -> None:
    """Write the measured values of finished runs as goldens: all of them, or none.

    A run directory, a directory with several, or an artifact of one (zip, tar). Workloads that
    agreed with their goldens are left alone; each other one must have been trained to the end,
    cleanly and at least twice.

    Exit code 0: written, or nothing differs. 1: something is refused, and nothing is written.
    """
    reason = " ".join((reason or "").split()) or None  # on one line
    terms = Terms(reason=reason, is_dirty_allowed=allow_dirty)
    policy = policy_named(golden_policy, root=root)
    with tempfile.TemporaryDirectory() as scratch:
        found = find_runs(runs, Path(scratch), _is_wanted)
        candidates = [c for run in found for c in read_run(run.directory, root, policy)]
        stopped = [r.name for r in found if read_run_file(r.directory).was_stopped]
        candidates = _select(candidates, only)
        outcome = _write(candidates, root, terms, is_dry=is_dry)
    _say_commit(candidates, root)
    for name in stopped:
        click.echo(f"{name} did not come to its end: run again what it lacks", err=True)
    _report(outcome, is_dry=is_dry)
    if stopped and not outcome.differences:
        sys.exit(EXIT_FAILED)


def _say_commit(candidates: Sequence[Candidate], root: Path) -> None:
    """Say that the candidates were measured at another commit than the one that is here."""
    here = ask_git(root, "rev-parse", "HEAD")
    origins = [c.golden.provenance for c in candidates if c.golden and c.golden.provenance]
    others = sorted({o.commit[:SHORT_COMMIT] for o in origins if o.commit not in (None, here)})
    if here is not None and others:
        click.echo(f"measured at {', '.join(others)}; HEAD is {here[:SHORT_COMMIT]}", err=True)


def _select(candidates: Sequence[Candidate], only: Sequence[str]) -> list[Candidate]:
    """Return those that `--only` names: by node id, part of one, or a pattern with `*`.

    Raises:
        GoldenError: One of the words names none.
    """
    if not only:
        return list(candidates)
    for word in only:
        if not any(_is_named(c, word) for c in candidates):
            known = ", ".join(sorted({c.node_id for c in candidates})) or "none"
            raise GoldenError("--only", f"{word!r} is no workload of these runs, they have {known}")
    return [c for c in candidates if any(_is_named(c, word) for word in only)]


def _is_named(candidate: Candidate, word: str) -> bool:
    return word in candidate.node_id or fnmatchcase(candidate.node_id, word)


def _is_wanted(path: PurePath) -> bool:
    return path.name in _WANTED and not set(_SKIPPED) & set(path.parts[:-1])


def _write(
    candidates: Sequence[Candidate], root: Path, terms: Terms, *, is_dry: bool
) -> AcceptOutcome:
    """Write accepted candidates, or name what was refused.

    Raises:
        GoldenError: They cannot be written; every golden is as it was.
    """
    try:
        return accept_candidates(candidates, root, terms, is_dry=is_dry)
    except OSError as error:
        where = str(error.filename or root)
        raise GoldenError(
            where, f"{error.strerror}; no golden was changed; make room, or make it writable"
        ) from error


def _report(outcome: AcceptOutcome, *, is_dry: bool) -> None:
    """Print the outcome of a set, and exit with 1 if it was refused."""
    if outcome.differences:
        click.echo(printable(differences_text(outcome.differences)))
    for name, refusal in outcome.refused:
        click.echo(plain(f"refused: {name}: {refusal.line}"), err=True)
    if outcome.refused:
        soft = all(refusal.rule.is_soft for _, refusal in outcome.refused)
        way = "give --reason TEXT" if soft else "run these again, or name the others with --only"
        click.echo(f"nothing was written; {way}", err=True)
        sys.exit(EXIT_FAILED)
    if not outcome.differences:
        click.echo("nothing to accept: no workload left a candidate")
    elif is_dry:
        click.echo(f"{len(outcome.differences)} would be written (--dry-run)")
    else:
        click.echo(f"{len(outcome.differences)} written")

"""`pytest-megatron golden review`: walks through what runs would change, and asks.

Nothing is written before the last answer; then everything that was accepted, together.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from pytest_megatron.base.text import plain
from pytest_megatron.cli.formats import PATH
from pytest_megatron.cli.golden_accept import (
    clean_reason,
    pages_directory,
    report,
    shared_options,
    write,
)
from pytest_megatron.errors import GoldenError
from pytest_megatron.golden.build import series_in
from pytest_megatron.golden.model import is_loss
from pytest_megatron.golden.policy import policy_named
from pytest_megatron.refresh.accept import Offer, Terms, consider
from pytest_megatron.refresh.candidate import Candidate, GateRule, hard
from pytest_megatron.refresh.difference import FileChange, MetricDifference
from pytest_megatron.refresh.gate import MIN_REPEATS
from pytest_megatron.refresh.pull_request import BOTH, NEW, OLD, interpret, plot
from pytest_megatron.refresh.read import CANDIDATE, REJECTED
from pytest_megatron.refresh.sources import open_runs, read_candidates, select
from pytest_megatron.refresh.text import metric_line
from pytest_megatron.runs.layout import OWN_DIR

_KEYS = "a accept, r reject, s skip, m show more, q quit"
_LATEST = OWN_DIR / "runs" / "latest"
_MOST_WIDTH = 100
_MOST_NAMED = 8  # node ids in a line to type; of more, their recipes
_PAGE = "curves.html"


@click.command("review")
@click.argument("runs", nargs=-1, metavar="[RUN|ARTIFACT...]", type=PATH)
@click.option("--accept-all", is_flag=True, help="Accept whatever the gate lets through, unasked.")
@click.option("--list", "is_list", is_flag=True, help="Only say what waits for a decision.")
@shared_options
def command(  # noqa: PLR0913 - click hands over one argument an option
    *,
    runs: tuple[Path, ...],
    accept_all: bool,
    is_list: bool,
    only: tuple[str, ...],
    reason: str | None,
    allow_dirty: bool,
    golden_policy: str,
    root: Path,
    form: str,
) -> None:
    """Decide on each golden that runs would change: accept, reject or skip it.

    Without RUN, the latest one of the project. A rejected candidate is not offered again, a
    skipped one is. Nothing is written before the last answer.
    """
    runs = runs or (root / _LATEST,)
    terms = Terms(reason=clean_reason(reason), is_dirty_allowed=allow_dirty)
    if not (accept_all or is_list or is_interactive()):
        raise GoldenError(
            "golden review",
            "needs a terminal to ask on; give --accept-all or --list, or use golden accept",
        )
    with open_runs(runs) as found:
        candidates = select(
            read_candidates(found, root, policy_named(golden_policy, root=root)), only
        )
        offers = [consider(c, root, terms) for c in candidates if c.golden is not None]
        offers = [offer for offer in offers if not offer.is_taken]
        _say_what_was_trained_once(offers)
        if is_list:
            _list(offers)
            return
        accepted, rejected = ([o.candidate for o in offers], []) if accept_all else _ask_all(offers)
        outcome = write(accepted, root, terms)
        if not outcome.refused:
            _put_away(rejected)
    if accepted:
        report(outcome, pages_directory(runs, root), terms, form=form)
    else:
        click.echo("nothing was accepted, so nothing was written")


def is_interactive() -> bool:
    """Whether somebody can answer."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def _say(text: str) -> None:
    """Print what may hold somebody's words, which must not steer the terminal."""
    click.echo(plain(text))


def _say_what_was_trained_once(offers: Sequence[Offer]) -> None:
    """Print which candidates nobody can accept, since a run that only compares trains once."""
    once = [o.candidate.node_id for o in offers if GateRule.REPEATS in {r.rule for r in o.refusals}]
    if not once:
        return
    files = dict.fromkeys(node_id.partition("::")[0] for node_id in once)
    again = once if len(once) <= _MOST_NAMED else list(files)
    line = shlex.join(["pytest", "-p", "megatron", *again, "--n-repeat", str(MIN_REPEATS)])
    text = (
        f"{len(once)} of {len(offers)} candidates cannot be accepted, they were not trained "
        f"{MIN_REPEATS} times, as a golden must be; for some that can be, commit, run\n    {line}\n"
        "and review again"
    )
    click.echo(plain(text), err=True)  # stdout may be read by a program


def _list(offers: Sequence[Offer]) -> None:
    if not offers:
        click.echo("nothing waits for a decision")
    for offer in offers:
        state = offer.refusals[0].line if offer.refusals else "may be accepted"
        _say(f"{offer.candidate.node_id}  {offer.candidate.target}  {state}")


def _ask_all(offers: Sequence[Offer]) -> tuple[list[Candidate], list[Candidate]]:
    """Return what was accepted and what was rejected.

    Raises:
        Abort: Somebody quit; nothing was decided.
    """
    accepted: list[Candidate] = []
    rejected: list[Candidate] = []
    for number, offer in enumerate(offers, start=1):
        _say(f"\n{number} of {len(offers)}: {offer.candidate.node_id}")
        _show(offer, is_all=False)
        key = _ask(offer)
        if key == "q":
            click.echo("quit: nothing was decided, nothing was written")
            raise click.exceptions.Exit(0)
        if key == "a":
            accepted.append(offer.candidate)
        elif key == "r":
            rejected.append(offer.candidate)
    if not offers:
        click.echo("nothing waits for a decision")
    return accepted, rejected


def _ask(offer: Offer) -> str:
    """Return the letter of a decision."""
    refused = bool(offer.refusals)
    while True:
        click.echo(f"{_KEYS}: ", nl=False)
        key = click.getchar().lower() or "q"  # nobody is there to answer
        click.echo(key if key.isprintable() else "")
        if key == "m":
            _show(offer, is_all=True)
        elif key == "a" and refused:
            needs = "it never may" if hard(offer.refusals) else "give --reason TEXT"
            _say(f"cannot be accepted, {needs}: {offer.refusals[0].line}")
        elif key in ("a", "r", "s", "q"):
            return key


def _show(offer: Offer, *, is_all: bool) -> None:
    """Print a golden and its candidate: figures, the curve that matters most, or all of them."""
    difference = offer.difference
    assert difference is not None
    click.echo(f"{difference.path}: {difference.state.value}")
    shown = sorted(difference.metrics, key=_weight, reverse=True)
    for metric in shown:
        _say(f"    {metric_line(metric)}")
    for sentence in interpret([difference]):
        click.echo(f"    {sentence}")
    for refusal in offer.refusals:
        _say(f"    {refusal.line}")
    width = min(_MOST_WIDTH, shutil.get_terminal_size().columns)
    before = {} if offer.old is None else series_in(offer.old)
    assert offer.candidate.golden is not None
    after = series_in(offer.candidate.golden)
    for metric in shown if is_all else shown[:1]:
        marks = f"{OLD} golden, {NEW} candidate, {BOTH} both"
        if difference.state is FileChange.NEW:
            marks = f"{NEW} candidate"
        _say(f"\n{metric.metric} ({marks}):")
        series = before.get(metric.metric), after.get(metric.metric)
        click.echo(plot(*series, width=width, height=12 if is_all else 8))
    page = offer.candidate.directory / _PAGE
    if page.is_file():
        click.echo(f"page: {page}")


def _weight(metric: MetricDifference) -> tuple[bool, bool, float]:
    return metric.is_outside, is_loss(metric.metric), metric.largest


def _put_away(rejected: Sequence[Candidate]) -> None:
    for candidate in rejected:
        path = candidate.directory / CANDIDATE
        path.replace(path.with_name(REJECTED))
        _say(f"rejected: {candidate.node_id}; {path.with_name(REJECTED)} keeps it")

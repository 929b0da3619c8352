"""`pytest-megatron golden accept` and `golden review`: goldens of finished runs, under a gate.

Thin: opens runs, asks `workloads/refresh/` and prints. `review` writes nothing before the last
answer; then everything that was accepted, together.
"""

from __future__ import annotations

import contextlib
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePath
from typing import ParamSpec

import click
from typing_extensions import TypedDict, Unpack

from pytest_megatron.base.command import EXIT_FAILED, PATH, format_option, root_option
from pytest_megatron.base.text import plain, printable
from pytest_megatron.errors import GoldenError
from pytest_megatron.runs.find import find_runs
from pytest_megatron.runs.layout import COMPARISON_FILE, OWN_DIR, PLAN_FILE, make_own_dir
from pytest_megatron.workloads.golden.build import series_in
from pytest_megatron.workloads.golden.model import is_loss
from pytest_megatron.workloads.golden.policy import ComparisonPolicy, policy_named
from pytest_megatron.workloads.refresh.difference import (
    MIN_CLUSTERED,
    FileChange,
    FileDifference,
    MetricDifference,
    cluster,
)
from pytest_megatron.workloads.refresh.gate import MIN_REPEATS, Candidate, GateRule, hard
from pytest_megatron.workloads.refresh.pull_request import (
    BOTH,
    NEW,
    OLD,
    commit_message,
    interpret,
    plot,
    refusals_text,
)
from pytest_megatron.workloads.refresh.read import CANDIDATE, REJECTED, read_run
from pytest_megatron.workloads.refresh.text import FORMS, metric_line, outcome_text
from pytest_megatron.workloads.refresh.transaction import (
    AcceptOutcome,
    Offer,
    Terms,
    consider,
    write_pages,
)
from pytest_megatron.workloads.refresh.transaction import accept as accept_candidates

_WANTED = (
    *(CANDIDATE, PLAN_FILE, COMPARISON_FILE, "metrics.json", "metrics.jsonl"),
    "generated.json",
)
_SKIPPED = ("checkpoints", "data_cache", "frozen_checkpoint", "project")


@contextlib.contextmanager
def open_runs(paths: Sequence[Path]) -> Iterator[tuple[Path, ...]]:
    """Yield the run directories in `paths`; unpacked files are gone afterwards.

    Raises:
        RunError: There is no run in one of them, or an archive is refused.
    """
    with tempfile.TemporaryDirectory() as scratch:
        found = find_runs(paths, Path(scratch), _is_wanted)
        yield tuple(run.directory for run in found)


def read_candidates(
    runs: Sequence[Path], root: Path, policy: ComparisonPolicy
) -> tuple[Candidate, ...]:
    """Return the workloads of several runs.

    Raises:
        GoldenError, RunError: A run cannot be read, see `read_run`.
    """
    return tuple(candidate for run in runs for candidate in read_run(run, root, policy))


def select(candidates: Sequence[Candidate], only: Sequence[str]) -> tuple[Candidate, ...]:
    """Return those that `--only` names: by node id, part of one, or a pattern with `*`.

    Raises:
        GoldenError: One of the words names none.
    """
    if not only:
        return tuple(candidates)
    for word in only:
        if not any(_is_named(c, word) for c in candidates):
            known = ", ".join(sorted({c.node_id for c in candidates})) or "none"
            raise GoldenError("--only", f"{word!r} is no workload of these runs, they have {known}")
    return tuple(c for c in candidates if any(_is_named(c, word) for word in only))


def _is_named(candidate: Candidate, word: str) -> bool:
    return word in candidate.node_id or fnmatchcase(candidate.node_id, word)


def _is_wanted(path: PurePath) -> bool:
    return path.name in _WANTED and not set(_SKIPPED) & set(path.parts[:-1])


_Arguments = ParamSpec("_Arguments")


class _RefreshOptions(TypedDict):
    """The values of the options that both commands have."""

    only: tuple[str, ...]
    reason: str | None
    allow_dirty: bool
    golden_policy: str
    root: Path
    form: str


def _shared_options(function: Callable[_Arguments, None]) -> Callable[_Arguments, None]:
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
@_shared_options
def accept(runs: tuple[Path, ...], *, is_dry: bool, **given: Unpack[_RefreshOptions]) -> None:
    """Write the measured values of finished runs as goldens: all of them, or none.

    A run directory, a directory with several, or an artifact of one (zip, tar). Workloads that
    agreed with their goldens are left alone; each other one must have been trained to the end,
    cleanly and at least twice.

    Exit code 0: written, or nothing differs. 1: something is refused, and nothing is written.
    """
    root, terms = given["root"], _terms(given)
    with open_runs(runs) as found:
        outcome = _write(_candidates(found, given), root, terms, is_dry=is_dry)
    _report(outcome, _pages_directory(runs, root), terms, form=given["form"], is_dry=is_dry)


def _terms(given: _RefreshOptions) -> Terms:
    """Return the terms of the options; the reason is on one line, None if it is empty."""
    reason = " ".join((given["reason"] or "").split()) or None
    return Terms(reason=reason, is_dirty_allowed=given["allow_dirty"])


def _candidates(runs: Sequence[Path], given: _RefreshOptions) -> tuple[Candidate, ...]:
    policy = policy_named(given["golden_policy"], root=given["root"])
    return select(read_candidates(runs, given["root"], policy), given["only"])


def _write(
    candidates: Sequence[Candidate], root: Path, terms: Terms, *, is_dry: bool = False
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


def _pages_directory(runs: Sequence[Path], root: Path) -> Path:
    """Return the directory of page and commit message: the one run, else our own directory."""
    if len(runs) == 1 and runs[0].is_dir():
        return runs[0]
    return root / OWN_DIR


def _report(
    outcome: AcceptOutcome, pages: Path, terms: Terms, *, form: str, is_dry: bool = False
) -> None:
    """Print the outcome of a set, write its pages, and exit with 1 if it was refused."""
    if form == "json" or outcome.differences:
        click.echo(printable(outcome_text(outcome, form, reason=terms.reason)))
    if outcome.refused:
        _refuse(outcome)
    if not outcome.differences:
        click.echo("nothing to accept: no workload left a candidate", err=form == "json")
    elif is_dry:
        click.echo(f"{len(outcome.differences)} would be written (--dry-run)", err=form == "json")
    elif outcome.is_written:
        _print_written(outcome, pages, terms, is_error=form == "json")


def _refuse(outcome: AcceptOutcome) -> None:
    """Name what was refused, and exit."""
    for line in refusals_text(outcome.refused):
        click.echo(f"refused: {line}", err=True)
    soft = all(refusal.rule.is_soft for _, refusal in outcome.refused)
    way = "give --reason TEXT" if soft else "run these again, or name the others with --only"
    click.echo(f"nothing was written; {way}", err=True)
    sys.exit(EXIT_FAILED)


def _print_written(outcome: AcceptOutcome, pages: Path, terms: Terms, *, is_error: bool) -> None:
    """Print what was written, and the pages for the pull request."""
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


_KEYS = "a accept, r reject, s skip, m show more, q quit"
_CLUSTER_KEYS = "a accept all, r reject all, s skip all, o one by one, m list them, q quit"
_LATEST = OWN_DIR / "runs" / "latest"
_MOST_WIDTH = 100
_MOST_NAMED = 8  # node ids in a line to type; of more, their recipes
_PAGE = "curves.html"


@click.command("review")
@click.argument("runs", nargs=-1, metavar="[RUN|ARTIFACT...]", type=PATH)
@click.option("--accept-all", is_flag=True, help="Accept whatever the gate lets through, unasked.")
@click.option("--list", "is_list", is_flag=True, help="Only list what waits for a decision.")
@_shared_options
def review(
    runs: tuple[Path, ...],
    *,
    accept_all: bool,
    is_list: bool,
    **given: Unpack[_RefreshOptions],
) -> None:
    """Decide on each golden that runs would change: accept, reject or skip it.

    Without RUN, the latest one of the project. A rejected candidate is not offered again, a
    skipped one is. Nothing is written before the last answer.
    """
    root, terms = given["root"], _terms(given)
    runs = runs or (root / _LATEST,)
    if not (accept_all or is_list or is_interactive()):
        raise GoldenError(
            "golden review",
            "needs a terminal to ask on; give --accept-all or --list, or use golden accept",
        )
    with open_runs(runs) as found:
        candidates = _candidates(found, given)
        offers = [consider(c, root, terms) for c in candidates if c.golden is not None]
        offers = [offer for offer in offers if not offer.is_taken]
        _print_trained_once(offers)
        if is_list:
            _list(offers)
            return
        accepted, rejected = ([o.candidate for o in offers], []) if accept_all else _ask_all(offers)
        outcome = _write(accepted, root, terms)
        if not outcome.refused:
            _put_away(rejected)
    if accepted:
        _report(outcome, _pages_directory(runs, root), terms, form=given["form"])
    else:
        click.echo("nothing was accepted, so nothing was written")


def is_interactive() -> bool:
    """Return whether a person can answer."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def _print(text: str) -> None:
    """Print text from a run without control characters, which could steer the terminal."""
    click.echo(plain(text))


def _print_trained_once(offers: Sequence[Offer]) -> None:
    """Print the candidates that cannot be accepted since they were trained once."""
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
    """Print the candidates that wait for a decision."""
    if not offers:
        click.echo("nothing waits for a decision")
    for offer in offers:
        state = offer.refusals[0].line if offer.refusals else "may be accepted"
        _print(f"{offer.candidate.node_id}  {offer.candidate.target}  {state}")


def _ask_all(offers: Sequence[Offer]) -> tuple[list[Candidate], list[Candidate]]:
    """Return the accepted and the rejected candidates.

    Raises:
        Exit: The user quit; nothing was decided.
    """
    decided: dict[str, list[Candidate]] = {"a": [], "r": [], "s": []}
    done = 0
    for text, together in _by_change(offers):
        first, done = done + 1, done + len(together)
        _print(f"\n{first} to {done} of {len(offers)}: {text}" if len(together) > 1 else "")
        if len(together) > 1 and (key := _ask_cluster(together)) != "o":
            decided[key] += [offer.candidate for offer in together]
            continue
        for number, offer in enumerate(together, start=first):
            _print(f"{number} of {len(offers)}: {offer.candidate.node_id}")
            _show(offer, is_all=False)
            decided[_ask(offer)].append(offer.candidate)
    if not offers:
        click.echo("nothing waits for a decision")
    return decided["a"], decided["r"]


def _by_change(offers: Sequence[Offer]) -> list[tuple[str, tuple[Offer, ...]]]:
    """Return many offers by the way in which they change, the rarest first; few one by one."""
    if len(offers) < MIN_CLUSTERED:
        return [("", (offer,)) for offer in offers]
    changing = [offer for offer in offers if _difference(offer).state is not FileChange.UNCHANGED]
    found = cluster(changing, _difference, lambda offer: [r.rule.value for r in offer.refusals])
    same = [("", (offer,)) for offer in offers if offer not in changing]
    return [*((one.text, one.members) for one in found), *same]


def _difference(offer: Offer) -> FileDifference:
    assert offer.difference is not None
    return offer.difference


def _ask_cluster(offers: Sequence[Offer]) -> str:
    """Show the largest change of goldens that change in the same way; return the decision."""
    _print(f"the largest change of them is that of {offers[0].candidate.node_id}")
    _show(offers[0], is_all=False)
    while True:
        key = _key(_CLUSTER_KEYS)
        if key == "m":
            for offer in offers:
                _print(f"    {offer.candidate.node_id}  largest {_difference(offer).largest:.1e}")
        elif key == "a" and offers[0].refusals:
            _print(_why_not(offers[0]))
        elif key in ("a", "r", "s", "o"):
            return key


def _ask(offer: Offer) -> str:
    """Return the letter of a decision."""
    while True:
        key = _key(_KEYS)
        if key == "m":
            _show(offer, is_all=True)
        elif key == "a" and offer.refusals:
            _print(_why_not(offer))
        elif key in ("a", "r", "s"):
            return key


def _why_not(offer: Offer) -> str:
    needs = "it never may" if hard(offer.refusals) else "give --reason TEXT"
    return f"cannot be accepted, {needs}: {offer.refusals[0].line}"


def _key(keys: str) -> str:
    """Return the letter that the user typed.

    Raises:
        Exit: The user quit; nothing was decided.
    """
    click.echo(f"{keys}: ", nl=False)
    key = click.getchar().lower() or "q"  # nobody is there to answer
    click.echo(key if key.isprintable() else "")
    if key == "q":
        click.echo("quit: nothing was decided, nothing was written")
        raise click.exceptions.Exit(0)
    return key


def _show(offer: Offer, *, is_all: bool) -> None:
    """Print a golden and its candidate: figures, the curve that matters most, or all of them."""
    difference = offer.difference
    assert difference is not None
    click.echo(f"{difference.path}: {difference.state.value}")
    shown = sorted(difference.metrics, key=_weight, reverse=True)
    for metric in shown:
        _print(f"    {metric_line(metric)}")
    for sentence in interpret([difference]):
        click.echo(f"    {sentence}")
    for refusal in offer.refusals:
        _print(f"    {refusal.line}")
    width = min(_MOST_WIDTH, shutil.get_terminal_size().columns)
    before = {} if offer.old is None else series_in(offer.old)
    assert offer.candidate.golden is not None
    after = series_in(offer.candidate.golden)
    for metric in shown if is_all else shown[:1]:
        marks = f"{OLD} golden, {NEW} candidate, {BOTH} both"
        if difference.state is FileChange.NEW:
            marks = f"{NEW} candidate"
        _print(f"\n{metric.metric} ({marks}):")
        series = before.get(metric.metric), after.get(metric.metric)
        click.echo(plot(*series, width=width, height=12 if is_all else 8))
    page = offer.candidate.directory / _PAGE
    if page.is_file():
        click.echo(f"page: {page}")


def _weight(metric: MetricDifference) -> tuple[bool, bool, float]:
    return metric.is_outside, is_loss(metric.metric), metric.largest


def _put_away(rejected: Sequence[Candidate]) -> None:
    """Keep rejected candidates under another name."""
    for candidate in rejected:
        path = candidate.directory / CANDIDATE
        path.replace(path.with_name(REJECTED))
        _print(f"rejected: {candidate.node_id}; {path.with_name(REJECTED)} keeps it")

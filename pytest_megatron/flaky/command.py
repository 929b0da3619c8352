"""`pytest-megatron flaky`: items that passed only when run again, and their quarantine."""

from __future__ import annotations

import datetime as dt
import difflib
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import click

from pytest_megatron.base.command import format_option
from pytest_megatron.base.files import JsonValue, read_text, write_text_atomically
from pytest_megatron.base.project import (
    Quarantine,
    QuarantineError,
    load_config,
    parse_quarantine,
    today,
)
from pytest_megatron.base.templates import render
from pytest_megatron.base.text import columns, printable
from pytest_megatron.errors import ConfigError
from pytest_megatron.flaky.quarantine import (
    check_pattern,
    edit_table,
    matches,
    owners_of,
    project_quarantines,
)
from pytest_megatron.runs.history import (
    FlakinessCase,
    HistoryEntry,
    HistoryRecord,
    days_ago,
    flakiness_cases,
    flaky_records,
    wilson_interval,
)
from pytest_megatron.runs.history_options import days_of, history_option, read_entries

_MOST_REVISIONS = 10  # of an item
_DEFAULT_DAYS = 30
_OWNERS = ("CODEOWNERS", ".github/CODEOWNERS", ".gitlab/CODEOWNERS", "docs/CODEOWNERS")


@click.command(name="flaky")
@history_option
@click.option("--since", metavar="SPAN", help="Only the last 30d, 12h, 2w; by default everything.")
@click.option(
    "--min-runs",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Leave out items that ran less often.",
)
@click.option(
    "--propose",
    is_flag=True,
    help="Print the text of a pull request instead: items for quarantine, and those that may go.",
)
@click.option(
    "--write", is_flag=True, help="With --propose: make the change in pyproject.toml as well."
)
@click.option("--owner", metavar="NAME", help="With --propose: instead of CODEOWNERS.")
@click.option("--until", metavar="DATE", help="With --propose: its last day.  [default: in 30 d]")
@click.option(
    "--clean-runs",
    type=click.IntRange(min=1),
    metavar="N",
    help="With --propose: runs without a failure until an item may go.  [default: by its rate]",
)
@format_option(
    "text", "json", "markdown", about="markdown is a table for a pull request or an issue."
)
def command(  # noqa: PLR0913 - click hands over one argument an option
    *,
    path: Path,
    since: str | None,
    min_runs: int,
    propose: bool,
    write: bool,
    owner: str | None,
    until: str | None,
    clean_runs: int | None,
    form: str,
) -> None:
    """Print how often each item was flaky, the worst first.

    An item is listed if it passed only when it was run again, or passed and failed at the same
    commit. Lines of the file that cannot be read are named on stderr and skipped.
    """
    others = {"--write": write, "--owner": owner, "--until": until, "--clean-runs": clean_runs}
    for option, given in others.items():
        if given and not propose:
            raise ConfigError(option, "is given without --propose")
    entries = read_entries(path)
    start = "" if since is None else days_ago(days_of(since))
    if propose:
        last_day = until or str(today() + dt.timedelta(days=_DEFAULT_DAYS))
        cases = flakiness_cases(entries, since=start, num_needed=clean_runs)
        proposal = _proposal(cases, entries, min_runs, last_day, owner)
        text = _proposal_json(proposal) if form == "json" else _proposal_markdown(proposal)
        if write and proposal.changed != proposal.text:
            _write_change(proposal)
        click.echo(text if form == "json" else printable(text), nl=False)
        return
    records = flaky_records(entries, since=start, min_runs=min_runs)
    text = _FORMATS[form](records)
    click.echo(text if form == "json" else printable(text), nl=False)


def _as_text(records: Sequence[HistoryRecord]) -> str:
    """Return flaky items as a table."""
    if not records:
        return "no item was flaky\n"
    head = ("flaky", "runs", "share", "failed", "last seen", "item", "causes")
    lines = columns([head, *map(_cells, records)], num_right=4)
    return "".join(f"{line}\n" for line in lines)


def _as_markdown(records: Sequence[HistoryRecord]) -> str:
    return render("flaky.md", rows=[(record, _cells(record)) for record in records])


def _as_json(records: Sequence[HistoryRecord]) -> str:
    """Return flaky items as JSON."""
    rows: list[JsonValue] = [
        {
            "node_id": record.node_id,
            "num_runs": record.num_runs,
            "num_flaky": record.num_flaky,
            "share": round(record.share, 4),
            "num_failed": record.num_bad,
            "causes": dict[str, JsonValue](record.causes),
            "is_contradictory": record.is_contradictory,
            "num_contradictory": record.num_contradictory,
            "first_seen": record.first_seen,
            "last_seen": record.last_seen,
        }
        for record in records
    ]
    return json.dumps(rows, indent=1) + "\n"


_FORMATS = {"text": _as_text, "json": _as_json, "markdown": _as_markdown}


def _cells(record: HistoryRecord) -> tuple[str, ...]:
    """Return the cells of an item's row."""
    causes = [f"{name} {count}" for name, count in record.causes]
    if record.is_contradictory:
        causes.append("passed and failed at one commit")
    return (
        str(record.num_flaky),
        str(record.num_runs),
        f"{record.share:.0%}",
        str(record.num_bad),
        record.last_seen[:10],
        record.node_id,
        ", ".join(causes),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entering:
    """An item that is to go into quarantine."""

    case: FlakinessCase
    quarantine: Quarantine
    owner: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Proposal:
    """A change of quarantine.

    Attributes:
        leaving: (items of it, pattern of the table); the pattern is None for a mark or a recipe.
        staying: Items that are in quarantine and may still be flaky.
        expired: (pattern or item, last day).
        unseen: Patterns of which no item is in the history.
        waiting: (item, why it is not proposed although it is flaky).
        file: The settings; `text` is what they are and `changed` what they are to be.
    """

    entering: list[_Entering]
    leaving: list[tuple[list[FlakinessCase], str | None]]
    staying: list[FlakinessCase]
    expired: list[tuple[str, str]]
    unseen: list[str]
    waiting: list[tuple[FlakinessCase, str]]
    file: Path
    text: str
    changed: str

    @property
    def diff(self) -> str:
        """The change, as `git apply` takes it."""
        old, new = (text.splitlines(keepends=True) for text in (self.text, self.changed))
        lines = difflib.unified_diff(old, new, f"a/{self.file.name}", f"b/{self.file.name}")
        return "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)


def _proposal(
    cases: Sequence[FlakinessCase],
    entries: Sequence[HistoryEntry],
    min_runs: int,
    last_day: str,
    owner: str | None,
) -> _Proposal:
    """Return which items go into quarantine, leave it or stay, by the history."""
    project = load_config(Path())
    file = project.file or Path("pyproject.toml")
    root = file.parent
    held = project_quarantines(project, root)
    text = read_text(file) if project.file else ""
    by_id = {case.node_id: case for case in cases}
    covered = {
        pattern: sorted({e.node_id for e in entries if matches(pattern, e.node_id)})
        for pattern in held
    }
    in_table = {name for names in covered.values() for name in names}
    entering: list[_Entering] = []
    waiting: list[tuple[FlakinessCase, str]] = []
    for case in cases:
        if case.node_id in in_table or case.is_in_quarantine or case.is_over:
            continue
        if case.num_runs < min_runs:
            continue
        obstacle = _obstacle(case, root)
        if obstacle:
            waiting.append((case, obstacle))
        else:
            entering.append(_entering(case, last_day, owner or _owner(case.node_id, root)))
    leaving: list[tuple[list[FlakinessCase], str | None]] = []
    for pattern, names in covered.items():
        if names and all(name in by_id and by_id[name].is_over for name in names):
            leaving.append(([by_id[name] for name in names], pattern))
    marked = [case for case in cases if case.is_in_quarantine and case.node_id not in in_table]
    leaving += [([case], None) for case in marked if case.is_over]
    gone = {case.node_id for found, _ in leaving for case in found}
    day = str(today())
    expired = [(pattern, str(one.until)) for pattern, one in held.items() if str(one.until) < day]
    expired += [(case.node_id, case.until) for case in marked if "" < case.until < day]
    try:
        changed = edit_table(
            text,
            added={one.case.node_id: one.quarantine for one in entering},
            removed=[pattern for _, pattern in leaving if pattern is not None],
        )
    except QuarantineError as problem:
        raise ConfigError(str(file), str(problem)) from None
    return _Proposal(
        entering=entering,
        leaving=leaving,
        staying=[
            case
            for case in cases
            if (case.node_id in in_table or case.is_in_quarantine) and case.node_id not in gone
        ],
        expired=expired,
        unseen=[pattern for pattern, names in covered.items() if not names],
        waiting=waiting,
        file=file,
        text=text,
        changed=changed if entering or any(p is not None for _, p in leaving) else text,
    )


def _obstacle(case: FlakinessCase, root: Path) -> str:
    """Return why a flaky item is not proposed; empty if it is."""
    if case.failing_since:
        return (
            f"its last runs failed, at {case.failing_since[:12]} and since: that may be a "
            f"regression, which quarantine would hide"
        )
    if "*" in case.node_id:
        return "its name has a *, which stands for any text in the table; mark the test itself"
    try:
        check_pattern(case.node_id, root)
    except QuarantineError as problem:
        return str(problem)
    return ""


def _entering(case: FlakinessCase, last_day: str, owner: str) -> _Entering:
    """Return the quarantine that is proposed for an item."""
    owner = " ".join(owner.split())
    reason = f"flaky: failed in {case.num_bad} of {case.num_runs} runs at revisions that passed"
    given = {"reason": f"{reason}; owner {owner}" if owner else reason, "until": last_day}
    try:
        return _Entering(case=case, quarantine=parse_quarantine(given), owner=owner)
    except QuarantineError as problem:
        raise ConfigError("--until", str(problem).removeprefix("until: ")) from None


def _owner(node_id: str, root: Path) -> str:
    """Return the owners of an item's file by the first `CODEOWNERS`; empty if it has none."""
    for name in _OWNERS:
        try:
            rules = read_text(root / name, errors="replace")
        except OSError:
            continue
        return owners_of(node_id.partition("::")[0], rules)
    return ""


def _write_change(proposal: _Proposal) -> None:
    """Write the proposed change into pyproject.toml."""
    try:
        write_text_atomically(proposal.file, proposal.changed)
    except OSError as error:
        raise ConfigError(str(proposal.file), f"cannot be written: {error.strerror}") from error
    click.echo(f"wrote {proposal.file}", err=True)


def _rate(case: FlakinessCase) -> str:
    """Describe the share of failed runs, with its interval."""
    number = case.num_runs
    low, high = wilson_interval(case.num_bad, number) if number else (0.0, 1.0)
    rate = case.num_bad / number if number else 0.0
    return f"{case.num_bad} of {number} runs, {rate:.1%} (95 %: {low:.1%} to {high:.1%})"


def _run_name(run: HistoryEntry) -> tuple[str, str]:
    """Return the name of a run and its URL, which is empty unless it is one of a CI system."""
    url = quote(run.page, safe=":/-._~%")
    return run.run, url if url.startswith("https://") else ""


def _reproduce(case: FlakinessCase) -> str:
    """Return a command that looks for the failure, on gangs like those that failed."""
    found = case.mixed[0]
    device, _, size = found.platform.partition(" x")
    if found.runs[0].kind != "test":
        return shlex.join(["pytest", "-p", "megatron", case.node_id, "--n-repeat", "20"])
    gang = ["--gpus", size] if device == "cuda" else ["--ranks", size, "--device", "cpu"]
    test = case.node_id.partition("[")[0]  # pytest-repeat makes repeats a parameter
    return shlex.join(["pytest", "-p", "megatron", *gang, "--count", "200", test])


def _proposal_markdown(proposal: _Proposal) -> str:
    """Return a proposal as the text of a pull request."""
    return render(
        "flaky_proposal.md",
        proposal=proposal,
        rate=_rate,
        run_name=_run_name,
        reproduce=_reproduce,
        most_revisions=_MOST_REVISIONS,
    )


def _proposal_json(proposal: _Proposal) -> str:
    """Return a proposal as JSON."""
    found: Mapping[str, JsonValue] = {
        "enter": [
            {
                **_case_json(one.case),
                "owner": one.owner or None,
                "reason": one.quarantine.reason,
                "until": str(one.quarantine.until),
            }
            for one in proposal.entering
        ],
        "leave": [
            {"pattern": pattern, "items": [_case_json(case) for case in cases]}
            for cases, pattern in proposal.leaving
        ],
        "stay": [_case_json(case) for case in proposal.staying],
        "expired": [{"name": name, "until": until} for name, until in proposal.expired],
        "unseen": list(proposal.unseen),
        "not_proposed": [{**_case_json(case), "why": why} for case, why in proposal.waiting],
        "diff": proposal.diff,
    }
    return json.dumps(found, indent=1) + "\n"


def _case_json(case: FlakinessCase) -> dict[str, JsonValue]:
    """Return the evidence on an item as JSON."""
    low, high = wilson_interval(case.num_bad, case.num_runs) if case.num_runs else (0.0, 1.0)
    return {
        "node_id": case.node_id,
        "num_failed": case.num_bad,
        "num_runs": case.num_runs,
        "rate_low": round(low, 4),
        "rate_high": round(high, 4),
        "num_failed_elsewhere": case.num_only_bad,
        "causes": dict[str, JsonValue](case.causes),
        "num_clean": len(case.clean),
        "num_clean_needed": case.num_needed,
        "revisions": [
            {
                "commit": found.commit,
                "platform": found.platform,
                "passed": [run.time for run in found.runs if run.is_good],
                "failed": [run.time for run in found.runs if not run.is_good],
            }
            for found in case.mixed
        ],
    }

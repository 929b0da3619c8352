"""`pytest-megatron flaky`: items that passed only when run again, and lines of quarantine."""

from __future__ import annotations

import datetime as dt
import json
import re
from collections.abc import Sequence
from pathlib import Path

import click

from pytest_megatron.base.command import format_option
from pytest_megatron.base.files import JsonValue
from pytest_megatron.base.project import Quarantine, today
from pytest_megatron.base.text import columns, counted, printable
from pytest_megatron.errors import ConfigError
from pytest_megatron.flaky.quarantine import table_line
from pytest_megatron.flaky.statistics import HistoryRecord, days_ago, flaky_records
from pytest_megatron.runs.history import HistoryEntry, read
from pytest_megatron.runs.layout import HISTORY_FILE, OWN_DIR

_SPAN = re.compile(r"(\d+)([hdw])").fullmatch
_DAYS = {"h": 1 / 24, "d": 1.0, "w": 7.0}
_QUARANTINE_DAYS = 30


@click.command(name="flaky")
@click.option(
    "--history",
    "path",
    type=click.Path(path_type=Path, dir_okay=False),
    default=OWN_DIR / HISTORY_FILE,
    show_default=True,
    help="The file that runs append to.",
)
@click.option("--since", metavar="SPAN", help="Only the last 30d, 12h, 2w; by default everything.")
@format_option("text", "json")
def command(*, path: Path, since: str | None, form: str) -> None:
    """Print how often each item was flaky, the worst first, and lines that quarantine them.

    An item is listed if it passed only when it was run again, or passed and failed at the same
    commit. Lines of the file that cannot be read are named on stderr and skipped.
    """
    start = "" if since is None else days_ago(_days_of(since))
    records = flaky_records(_read_entries(path), since=start)
    click.echo(_as_json(records) if form == "json" else printable(_as_text(records)), nl=False)


def _read_entries(path: Path) -> tuple[HistoryEntry, ...]:
    """Return the entries of a history; lines that are none are named on stderr.

    Raises:
        ConfigError: It is not there, or cannot be read.
    """
    if not path.exists():
        raise ConfigError(
            str(path), "is not there; runs with workloads or distributed tests write it"
        )
    try:
        history = read(path)
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error.strerror}") from error
    for problem in history.problems:
        click.echo(printable(problem), err=True)
    return history.entries


def _days_of(span: str) -> float:
    """Return the number of days of a span such as 12h or 2w.

    Raises:
        ConfigError: The text is no span.
    """
    match = _SPAN(span)
    if match is None:
        raise ConfigError("--since", f"found {span!r}, expected a number with h, d or w, as in 30d")
    return int(match[1]) * _DAYS[match[2]]


def _as_text(records: Sequence[HistoryRecord]) -> str:
    """Return flaky items as a table, and the lines that put some of them into quarantine."""
    if not records:
        return "no item was flaky\n"
    head = ("flaky", "runs", "share", "failed", "last seen", "item", "causes")
    lines = columns([head, *map(_cells, records)], num_right=4)
    if rows := [_line(record) for record in records if _may_be_held(record)]:
        lines += ["", "lines of pyproject.toml that put them into quarantine:", ""]
        lines += ["[tool.pytest-megatron.quarantine]", *rows]
    return "".join(f"{line}\n" for line in lines)


def _may_be_held(record: HistoryRecord) -> bool:
    """Return true for an item that passed and failed at one commit, and is not in quarantine."""
    return record.is_contradictory and not record.is_in_quarantine


def _line(record: HistoryRecord) -> str:
    """Return the line of the table of quarantine for an item."""
    failures = counted(record.num_contradictory, "failure")
    reason = f"flaky: {failures} at commits at which it also passed"
    until = today() + dt.timedelta(days=_QUARANTINE_DAYS)
    return table_line(record.node_id, Quarantine(reason=reason, until=until))


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

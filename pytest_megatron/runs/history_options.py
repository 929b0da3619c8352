"""The history of runs in commands: its option, its entries, and spans of time."""

from __future__ import annotations

import re
from pathlib import Path

import click

from pytest_megatron.base.text import printable
from pytest_megatron.errors import ConfigError
from pytest_megatron.runs.history import HistoryEntry, read
from pytest_megatron.runs.layout import HISTORY_FILE, OWN_DIR

_SPAN = re.compile(r"(\d+)([hdw])").fullmatch
_DAYS = {"h": 1 / 24, "d": 1.0, "w": 7.0}
DEFAULT_HISTORY = OWN_DIR / HISTORY_FILE
history_option = click.option(
    "--history",
    "path",
    type=click.Path(path_type=Path, dir_okay=False),
    default=DEFAULT_HISTORY,
    show_default=True,
    help="The file that runs append to.",
)


def read_entries(path: Path) -> tuple[HistoryEntry, ...]:
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


def days_of(span: str) -> float:
    """Return the number of days of a span such as 12h or 2w.

    Raises:
        ConfigError: It is none.
    """
    match = _SPAN(span)
    if match is None:
        raise ConfigError("--since", f"found {span!r}, expected a number with h, d or w, as in 30d")
    return int(match[1]) * _DAYS[match[2]]

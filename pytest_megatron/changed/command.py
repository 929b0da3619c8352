"""`pytest-megatron changed`, and `plan --replay`: records of what tests use, and their worth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import click

from pytest_megatron.base.command import HintingGroup, echo_json
from pytest_megatron.base.files import JsonValue
from pytest_megatron.base.project import SHORT_COMMIT
from pytest_megatron.base.text import columns, counted, printable
from pytest_megatron.changed.record import DEFAULT_FILE, merge_records, read_record, write_record
from pytest_megatron.changed.replay import ReplayedCommit, ReplayReport, replay
from pytest_megatron.changed.select import FILE_NAME as DRAWN
from pytest_megatron.changed.select import read_drawn
from pytest_megatron.errors import ConfigError
from pytest_megatron.runs.history import durations_of, outcomes_by_commit, wilson_interval
from pytest_megatron.runs.history_options import read_known_entries
from pytest_megatron.runs.layout import OWN_DIR

_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)
_HEAD = (
    *("commit", "items", "run", "unknown", "assumed", "skipped", "saved", "judged", "failed"),
    "subject",
)


@click.group(name="changed", cls=HintingGroup)
def changed() -> None:
    """Records of the code and the files that tests use."""


@changed.command(name="merge")
@click.argument(
    "files",
    nargs=-1,
    required=True,
    metavar="FILE...",
    type=_FILE,
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    default=DEFAULT_FILE,
    show_default=True,
    help="The file to write.",
)
def merge(files: tuple[Path, ...], output: Path) -> None:
    """Join the records of several jobs; of a test that two of them have, the later one counts."""
    record = merge_records([read_record(file) for file in files])
    try:
        write_record(output, record)
    except OSError as error:
        raise ConfigError(str(output), f"cannot be written: {error.strerror}") from error
    click.echo(f"{output}: {counted(len(record.tests), 'test')} of {counted(len(files), 'record')}")


@changed.command(name="audit")
@click.argument(
    "files",
    nargs=-1,
    metavar="[FILE]...",
    type=_FILE,
)
def audit(files: tuple[Path, ...]) -> None:
    """Print how many of the tests that --changed left out would have failed, by those it drew."""
    paths = files or (OWN_DIR / DRAWN,)
    # Files of jobs that began with the same cache have the same lines.
    runs = [*dict.fromkeys(run for path in paths for run in read_drawn(path))]
    number = sum(len(run.drawn) for run in runs)
    if not number:
        problem = (
            "has no drawn tests; sessions with --changed write it, unless megatron_changed_draw=off"
        )
        raise ConfigError(", ".join(map(str, paths)), problem)
    num_missed = sum(len(run.missed) for run in runs)
    low, high = wilson_interval(num_missed, number)
    failed = f"{num_missed} of {counted(number, 'drawn test')} failed"
    rate = f"{num_missed / number:.1%} (95 %: {low:.1%} to {high:.1%})"
    click.echo(
        f"{failed} in {counted(len(runs), 'session')}, {rate}; nothing changed for "
        f"{sum(run.num_left_out for run in runs)} tests"
    )
    for run in sorted(runs, key=lambda run: run.time):
        for node_id in sorted(run.missed):
            where = (run.commit or "no commit")[:SHORT_COMMIT]
            click.echo(printable(f"    {node_id} failed at {where}, {run.time}, seed {run.seed}"))


def print_replay(
    number: int,
    files: Sequence[Path],
    history: Path,
    form: str,
    is_explained: bool,  # noqa: FBT001 - a value, not a choice
) -> None:
    """Print what `--changed` would have left out at each of the last commits, and missed.

    Args:
        number: How many commits.
        files: Records; none are the project's.
        history: File of outcomes.
        form: `text` or `json`.
        is_explained: Whether every reason and item is named.

    Raises:
        ConfigError: A record or the history cannot be used.
        SelectionError: git is missing, or has not what it takes.
    """
    files = files or (DEFAULT_FILE,)
    records = [read_record(file) for file in files]
    for file, record in zip(files, records, strict=True):
        if not record.tests:
            raise ConfigError(
                str(file), "has no record of this version; run tests with --record-changed"
            )
    entries = read_known_entries(history)
    outcomes, durations = outcomes_by_commit(entries), durations_of(entries)
    found = replay(Path.cwd(), number, records, outcomes, durations)
    if form == "json":
        echo_json(_replay_as_json(found, is_explained=is_explained))
        return
    for line in _replay_lines(found, number, is_explained=is_explained):
        click.echo(printable(line))


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _replay_lines(found: ReplayReport, number: int, *, is_explained: bool) -> Iterator[str]:
    """Yield the lines of a replay: its table and its sums."""
    lines = columns([_HEAD, *map(_replay_row, found.commits)], num_right=9)
    yield lines[0]
    for one, line in zip(found.commits, lines[1:], strict=True):
        yield line
        for word in ("run", "unknown", "assumed"):
            reasons: dict[str, str] = getattr(one, word)
            ordered = Counter(reasons.values()).most_common(None if is_explained else 1)
            if is_explained or word != "run":
                yield from (f"    {word}: {count}: {reason}" for reason, count in ordered)
    if found.is_short:
        yield f"git has {len(found.commits)} of the {number} commits here"
    yield from _replay_sum_lines(found)
    if found.assuming is not None and any(one.assumed for one in found.commits):
        yield ""
        yield "no proof: if items used then what they use in the nearest record,"
        yield from _replay_sum_lines(found.assuming)


def _replay_sum_lines(found: ReplayReport) -> Iterator[str]:
    """Yield what was skipped, saved and wrong over all commits."""
    sums = _replay_sums(found)
    yield (
        f"skipped {sums['num_skipped']} of {sums['num_items']} times; saved {sums['saved']:.0f} "
        f"of {sums['total']:.0f} {found.unit}, {_share(sums['saved'], sums['total'])}"
    )
    num_others = sums["num_unknown"] + sums["num_assumed"]
    if num_others:
        yield (
            f"unknown or assumed {num_others} times, and counted as run: no record has the code of "
            "the commit or of the one before; give more records by --changed-file"
        )
    if not sums["num_judged"]:
        yield "no false green rate: the history has no outcome of a skipped item"
        return
    rate = _share(sums["num_failed"], sums["num_judged"])
    yield (
        f"judged {sums['num_judged']} of the skipped by the next run of each, if --changed would "
        f"not have run it earlier: {sums['num_failed']} failed, false green rate {rate}"
    )
    for green in found.false_greens:
        flaky = ", and passed there as well" if green.is_contradictory else ""
        yield (
            f"    {green.node_id} failed at {green.commit[:SHORT_COMMIT]}{flaky}; "
            f"skipped since {green.since[:SHORT_COMMIT]}"
        )


def _replay_row(one: ReplayedCommit) -> tuple[str, ...]:
    """Return the cells of a commit."""
    parts = (one.items, one.run, one.unknown, one.assumed, one.skipped)
    judged = (one.num_judged, one.num_failed)
    share = _share(one.saved, one.total)
    numbers = (*(str(len(part)) for part in parts), share, *map(str, judged))
    return (one.commit[:SHORT_COMMIT], *numbers, one.subject)


def _replay_counts(one: ReplayedCommit) -> dict[str, float]:
    """Return how many items of a commit ran, were skipped and so on."""
    return {
        "num_items": len(one.items),
        "num_run": len(one.run),
        "num_unknown": len(one.unknown),
        "num_assumed": len(one.assumed),
        "num_skipped": len(one.skipped),
        "num_judged": one.num_judged,
        "num_failed": one.num_failed,
        "total": round(one.total, 3),
        "saved": round(one.saved, 3),
    }


def _replay_sums(found: ReplayReport) -> dict[str, float]:
    rows = [_replay_counts(one) for one in found.commits]
    return {name: sum(row[name] for row in rows) for name in rows[0]}


def _replay_as_json(found: ReplayReport, *, is_explained: bool) -> dict[str, JsonValue]:
    """Return a replay as JSON."""
    sums = _replay_sums(found)
    judged = sums["num_judged"]
    return {
        "unit": found.unit,
        "is_short": found.is_short,
        **sums,
        "false_green_rate": sums["num_failed"] / judged if judged else None,
        "false_greens": [asdict(green) for green in found.false_greens],
        "assuming": None
        if found.assuming is None
        else _replay_as_json(found.assuming, is_explained=is_explained),
        "commits": [
            {
                "commit": one.commit,
                "subject": one.subject,
                **_replay_counts(one),
                "run": _reasons(one.run, is_explained=is_explained),
                "unknown": _reasons(one.unknown, is_explained=is_explained),
                "assumed": _reasons(one.assumed, is_explained=is_explained),
                **({"skipped": list[JsonValue](one.skipped)} if is_explained else {}),
            }
            for one in found.commits
        ],
    }


def _reasons(reasons: Mapping[str, str], *, is_explained: bool) -> dict[str, JsonValue]:
    """Return node id -> reason, or reason -> number of items."""
    return dict(reasons) if is_explained else dict(Counter(reasons.values()).most_common())

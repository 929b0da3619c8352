"""`pytest-megatron plan`, `changed` and `cost`: jobs of CI, what changed, and what items cost.

`plan --replay` shows what leaving out unchanged items would have saved and missed.
"""

from __future__ import annotations

import csv
import io
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import click
from click.core import ParameterSource
from typing_extensions import TypedDict, Unpack

from pytest_megatron.base.command import (
    EXIT_UNUSABLE,
    PATH,
    Choice,
    HintingGroup,
    echo_error,
    echo_json,
    format_option,
)
from pytest_megatron.base.files import JsonValue, read_text
from pytest_megatron.base.templates import render
from pytest_megatron.base.text import columns, counted, printable, rough_time
from pytest_megatron.changed.drawn import FILE_NAME as DRAWN
from pytest_megatron.changed.drawn import read_drawn
from pytest_megatron.changed.record import FILE_NAME, merge_records, read_record, write_record
from pytest_megatron.changed.replay import ReplayedCommit, ReplayReport, replay
from pytest_megatron.changed.select import unaffected_since
from pytest_megatron.ci.budget import Budget, parse_budget
from pytest_megatron.ci.decide import (
    PathChange,
    Trigger,
    changes_since,
    parse_changes,
    parse_labels,
)
from pytest_megatron.ci.plan import BrokenRecipesError, CiPlan, PlanRequest, make_plan
from pytest_megatron.ci.plan_text import as_text, github_outputs, matrix_problem, outputs_text
from pytest_megatron.culprit.search import SHORT
from pytest_megatron.errors import ConfigError, EmptySelectionError, SelectionError
from pytest_megatron.flaky.command import (
    days_of,
    history_option,
    read_entries,
    read_known_entries,
)
from pytest_megatron.runs.history import (
    COST_KEYS,
    CostRow,
    HistoryEntry,
    cost_rows,
    days_ago,
    device_time,
    durations_of,
    outcomes_by_commit,
    wilson_interval,
)
from pytest_megatron.runs.layout import OWN_DIR
from pytest_megatron.workloads.recipe.expand import Profile
from pytest_megatron.workloads.recipe.model import CADENCES

EXIT_EMPTY = 5  # as pytest's for no tests
OUTPUT_VARIABLE = "GITHUB_OUTPUT"
_OF_REPLAY = frozenset(("replay", "path", "changed_file", "explain", "form"))
_REPLAY_HEAD = (
    *("commit", "items", "run", "unknown", "assumed", "skipped", "saved", "judged", "failed"),
    "subject",
)
_KINDS = {"workloads": ("workload",), "units": ("unit",), "all": ("workload", "unit")}


class _PlanOptions(TypedDict):
    """The values of the options."""

    labels: str
    event: str
    ref: str
    cadence: str | None
    environment: str | None
    platform: tuple[str, ...]
    model: tuple[str, ...]
    test_case: tuple[str, ...]
    tag: str | None
    recipes: tuple[Path, ...]
    recipe_profile: str | None
    only: str
    shards: int | None
    durations: tuple[Path, ...]
    gpus: int
    ranks: int
    changed_paths: str | None
    diff: str | None
    changed: str | None
    changed_file: tuple[Path, ...]
    replay: int | None
    budget: str | None
    path: Path
    apply_suggestion: bool
    explain: bool
    allow_empty: bool
    form: str


@click.command(name="plan")
@click.option(
    "--labels",
    default="",
    metavar="LIST",
    help="Labels of the pull request: with commas, or a JSON array.",
)
@click.option("--event", default="pull_request", show_default=True, metavar="NAME")
@click.option("--ref", default="", metavar="REF", help="For rules about pushes: refs/heads/main.")
@click.option("--cadence", type=Choice(CADENCES), help="What a schedule is for.")
@click.option("--environment", metavar="NAME", help="Instead of what labels say.")
@click.option("--platform", multiple=True, metavar="LIST", help="Only jobs for this hardware.")
@click.option("--model", multiple=True, metavar="LIST", help="Only workloads of this model.")
@click.option(
    "--test-case", multiple=True, metavar="LIST", help="Only workloads of this test case."
)
@click.option("--tag", metavar="NAME", help="Only rows with this tag; of unit tests latest.")
@click.option(
    "--recipes",
    multiple=True,
    type=PATH,
    metavar="PATH",
    help="Recipe or directory, repeatable; recipes/ by default.",
)
@click.option("--recipe-profile", type=Choice([p.value for p in Profile]))
@click.option("--only", type=Choice(list(_KINDS)), default="all", show_default=True)
@click.option(
    "--shards",
    type=click.IntRange(min=1),
    metavar="N",
    help="N jobs of unit tests, balanced by durations, instead of the recipes' buckets.",
)
@click.option(
    "--durations",
    multiple=True,
    type=PATH,
    metavar="PATH",
    help="History, JUnit XML or JSON, repeatable; the project's history by default.",
)
@click.option("--gpus", type=click.IntRange(min=0), default=0, help="Of each shard's gang.")
@click.option("--ranks", type=click.IntRange(min=0), default=0, help="The same on the CPU.")
@click.option(
    "--changed-paths",
    metavar="FILE|-",
    help="Changed paths, or git diff --name-status; suggests a label.",
)
@click.option("--diff", metavar="REV", help="The same for what changed since REV.")
@click.option(
    "--changed", metavar="BASE", help="Leave out jobs for which nothing changed since recorded."
)
@click.option(
    "--changed-file",
    multiple=True,
    type=PATH,
    default=[OWN_DIR / FILE_NAME],
    show_default=True,
    help="The record of what tests use, repeatable.",
)
@click.option(
    "--replay",
    type=click.IntRange(min=1),
    metavar="N",
    help="Print what --changed would have left out at each of the last N commits, and missed.",
)
@click.option(
    "--budget",
    metavar="TIME",
    help="GPU time, such as 2h or '40 GPU-h': drop what detects least for its price.",
)
@history_option
@click.option("--apply-suggestion", is_flag=True, help="Plan as if that label were attached.")
@click.option("--explain", is_flag=True, help="Print why each rule and row is in or out.")
@click.option("--allow-empty", is_flag=True, help="A plan without jobs is no error.")
@format_option(
    "text", "json", "github", about=f"github appends step outputs to ${OUTPUT_VARIABLE}."
)
def command(**given: Unpack[_PlanOptions]) -> None:
    """Print the CI jobs for labels and an event, with the exact command of each.

    Run it from the project's root. Exits with 5 if nothing is selected, with 2 if the labels, the
    event, a recipe or the project's table are unusable.

    With --replay it plans nothing: it goes through past commits, by git, the records of
    --record-changed and the history of runs.
    """
    if given["replay"] is not None:
        _print_replay(given["replay"], given)
        return
    request = _request(given)
    try:
        plan = make_plan(request)
    except BrokenRecipesError as broken:
        for finding in broken.findings:
            echo_error(finding)
        sys.exit(EXIT_UNUSABLE)
    except EmptySelectionError as error:
        echo_error(error)
        if given["explain"]:
            empty = make_plan(replace(request, is_empty_allowed=True))
            click.echo(as_text(empty, is_explained=True), nl=False, err=True)
        sys.exit(EXIT_EMPTY)
    _FORMS[given["form"]](plan, is_explained=given["explain"])


def _request(given: _PlanOptions) -> PlanRequest:
    if given["changed_paths"] is not None and given["diff"] is not None:
        raise SelectionError("--diff", "--changed-paths is given as well; give one of them")
    if given["gpus"] and given["ranks"]:
        raise SelectionError("--gpus", "--ranks is given as well; give one of them")
    root, profile = Path(), given["recipe_profile"]
    return PlanRequest(
        root=root,
        trigger=Trigger(
            event=given["event"],
            labels=parse_labels(given["labels"]),
            ref=given["ref"],
            cadence=given["cadence"],
            environment=given["environment"],
        ),
        recipes=given["recipes"],
        profile=None if profile is None else Profile(profile),
        platforms=_split(given["platform"]),
        models=_split(given["model"]),
        test_cases=_split(given["test_case"]),
        tag=given["tag"],
        kinds=_KINDS[given["only"]],
        num_shards=given["shards"],
        durations=given["durations"],
        gpus=given["gpus"],
        ranks=given["ranks"] or given["gpus"],
        changes=_changes(root, given["changed_paths"], given["diff"]),
        unaffected=None
        if given["changed"] is None
        else unaffected_since(root, given["changed"], given["changed_file"]),
        budget=_budget(given["budget"], given["path"]),
        is_suggestion_applied=given["apply_suggestion"],
        is_empty_allowed=given["allow_empty"],
    )


def _budget(text: str | None, path: Path) -> tuple[Budget, tuple[HistoryEntry, ...]] | None:
    """Return a budget, and the runs by which costs are expected."""
    if text is None:
        return None
    return parse_budget(text, "--budget"), read_known_entries(path)


def _split(lists: tuple[str, ...]) -> tuple[str, ...]:
    """Return the words of lists with commas; empty words are none."""
    return tuple(word.strip() for text in lists for word in text.split(",") if word.strip())


def _changes(root: Path, path: str | None, revision: str | None) -> tuple[PathChange, ...] | None:
    if revision is not None:
        return changes_since(root, revision)
    if path is None:
        return None
    try:
        text = sys.stdin.read() if path == "-" else read_text(Path(path))
    except (OSError, UnicodeDecodeError) as problem:
        raise SelectionError(f"--changed-paths {path}", f"cannot be read: {problem}") from None
    return parse_changes(text)


def _print_text(plan: CiPlan, *, is_explained: bool) -> None:
    click.echo(as_text(plan, is_explained=is_explained), nl=False)


def _print_json(plan: CiPlan, *, is_explained: bool) -> None:
    found = plan.as_json(is_explained=is_explained)
    if run_id := os.environ.get("GITHUB_RUN_ID"):  # an artifact of another run is not of this plan
        found["run_id"] = run_id
    click.echo(json.dumps(found, indent=1))


def _write_outputs(plan: CiPlan, *, is_explained: bool) -> None:
    """Append outputs to the step's file; the log gets the text.

    Raises:
        SelectionError: GitHub would refuse the matrix, or the file cannot be written.
    """
    problem = matrix_problem(plan)
    if problem is not None:
        raise SelectionError("--format github", problem)
    text = outputs_text(github_outputs(plan))
    path = os.environ.get(OUTPUT_VARIABLE)
    if not path:
        click.echo(text, nl=False)
        return
    try:
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as problem_of_file:
        where = f"${OUTPUT_VARIABLE}"
        raise SelectionError(where, f"cannot be written: {problem_of_file}") from None
    _print_text(plan, is_explained=is_explained)


_FORMS = {"text": _print_text, "json": _print_json, "github": _write_outputs}


def _print_replay(number: int, given: _PlanOptions) -> None:
    context = click.get_current_context()
    for option in context.command.params:
        name = str(option.name)
        is_given = context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if is_given and name not in _OF_REPLAY:
            raise SelectionError(option.opts[0], "is for a plan; leave it out beside --replay")
    if given["form"] == "github":
        raise SelectionError("--format github", "is for a plan; --replay has text and json")
    records = [read_record(file) for file in given["changed_file"]]
    for file, record in zip(given["changed_file"], records, strict=True):
        if not record.tests:
            raise ConfigError(
                str(file), "has no record of this version; run tests with --record-changed"
            )
    entries = read_known_entries(given["path"])
    outcomes, durations = outcomes_by_commit(entries), durations_of(entries)
    found = replay(Path.cwd(), number, records, outcomes, durations)
    if given["form"] == "json":
        echo_json(_replay_as_json(found, is_explained=given["explain"]))
        return
    for line in _replay_lines(found, number, is_explained=given["explain"]):
        click.echo(printable(line))


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _replay_lines(found: ReplayReport, number: int, *, is_explained: bool) -> Iterator[str]:
    lines = columns([_REPLAY_HEAD, *map(_replay_row, found.commits)], num_right=9)
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
            f"    {green.node_id} failed at {green.commit[:SHORT]}{flaky}; "
            f"skipped since {green.since[:SHORT]}"
        )


def _replay_row(one: ReplayedCommit) -> tuple[str, ...]:
    parts = (one.items, one.run, one.unknown, one.assumed, one.skipped)
    judged = (one.num_judged, one.num_failed)
    share = _share(one.saved, one.total)
    numbers = (*(str(len(part)) for part in parts), share, *map(str, judged))
    return (one.commit[:SHORT], *numbers, one.subject)


def _replay_counts(one: ReplayedCommit) -> dict[str, float]:
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


@click.group(name="changed", cls=HintingGroup)
def changed() -> None:
    """Records of the code and the files that tests use."""


@changed.command(name="merge")
@click.argument(
    "files",
    nargs=-1,
    required=True,
    metavar="FILE...",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    default=OWN_DIR / FILE_NAME,
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
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
)
def audit(files: tuple[Path, ...]) -> None:
    """Print how many of the tests that --changed left out would have failed, by those it drew."""
    paths = files or (OWN_DIR / DRAWN,)
    # Files of jobs that began with the same cache have the same lines.
    runs = [*dict.fromkeys(run for path in paths for run in read_drawn(path))]
    number = sum(len(run.drawn) for run in runs)
    if not number:
        problem = "has no drawn tests; sessions with --changed write it, unless --changed-draw off"
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
            where = (run.commit or "no commit")[:SHORT]
            click.echo(printable(f"    {node_id} failed at {where}, {run.time}, seed {run.seed}"))


_DEARER = 0.1  # share from which on a page lists a change
_HEAD = ("cost", "before", "a run", "change", "runs", "wall")


@dataclass(frozen=True, slots=True, kw_only=True)
class _CostTable:
    """Costs by one key.

    Attributes:
        span: The span that was typed; `since` is where it begins.
    """

    by: str
    span: str
    since: str
    rows: tuple[CostRow, ...]

    @property
    def cells(self) -> list[tuple[str, ...]]:
        """The rows as they are shown."""
        return [_cost_cells(row) for row in self.rows]


@click.command(name="cost")
@history_option
@click.option("--by", type=Choice(list(COST_KEYS)), default="item", show_default=True)
@click.option(
    "--since",
    metavar="SPAN",
    default="7d",
    show_default=True,
    help="30d, 12h, 2w; compared with the span before it.",
)
@click.option(
    "--sort",
    type=Choice(["cost", "change"]),
    default="cost",
    show_default=True,
    help="change begins with what got dearer by most.",
)
@format_option("text", "json", "csv", "html", about="html is a page with all keys of --by.")
def cost(*, path: Path, by: str, since: str, sort: str, form: str) -> None:
    """Print what runs cost: GPUs times seconds, over all attempts and repeats.

    On the CPU, processes count in place of GPUs; both are never added up. A change is that of the
    mean of one run.
    """
    days = days_of(since)
    start, before = days_ago(days), days_ago(2 * days)
    entries = read_entries(path)
    tables = {
        key: _CostTable(
            by=key, span=since, since=start, rows=_sorted_rows(entries, key, start, before, sort)
        )
        for key in (COST_KEYS if form == "html" else (by,))
    }
    match form:
        case "html":
            text = _cost_page(list(tables.values()))
        case "csv":
            text = _cost_csv(tables[by])
        case "json":
            text = json.dumps(_cost_json(tables[by]), indent=1) + "\n"
        case _:
            text = printable(_cost_text(tables[by]))
    click.echo(text, nl=False)


def _sorted_rows(
    entries: Sequence[HistoryEntry], by: str, since: str, before: str, sort: str
) -> tuple[CostRow, ...]:
    rows = cost_rows(entries, by, since=since, before=before)
    return tuple(sorted(rows, key=lambda r: -r.extra_s)) if sort == "change" else rows


def _cost_cells(row: CostRow) -> tuple[str, ...]:
    known = row.run_s is not None
    at_least = ">= " if row.num_unknown else ""
    return (
        at_least + device_time(row.device_s, row.device) if known else "unknown",
        device_time(row.before_s, row.device) if row.num_before else "-",
        device_time(row.run_s, row.device) if row.run_s is not None else "-",
        "-" if row.change is None else f"{row.change:+.0%}",
        str(row.num_runs),
        rough_time(row.wall_s),
        row.key,
    )


def _unknown_line(table: _CostTable) -> str:
    """Return the line about runs whose cost is not known, "" where there are none."""
    number = sum(row.num_unknown for row in table.rows)
    if not number:
        return ""
    return (
        f"{counted(number, 'run')} of earlier versions: the number of GPUs is unknown, so their "
        "cost is not in the sums"
    )


def _cost_text(table: _CostTable) -> str:
    if not table.rows:
        return f"no runs in the last {table.span}\n"
    lines = columns([(*_HEAD, table.by), *table.cells], num_right=len(_HEAD))
    lines.append(f"\nthe last {table.span}; before: the {table.span} before that")
    lines += [line] if (line := _unknown_line(table)) else []
    return "".join(f"{line}\n" for line in lines)


def _cost_json(table: _CostTable) -> dict[str, JsonValue]:
    rows: list[JsonValue] = [
        {
            table.by: row.key,
            "device": row.device,
            "device_s": round(row.device_s, 3),
            "wall_s": round(row.wall_s, 3),
            "num_runs": row.num_runs,
            "num_unknown": row.num_unknown,
            "before_device_s": round(row.before_s, 3),
            "num_before": row.num_before,
            "change": None if row.change is None else round(row.change, 4),
        }
        for row in table.rows
    ]
    return {"schema": 1, "by": table.by, "since": table.since, "rows": rows}


def _cost_csv(table: _CostTable) -> str:
    """Return a table for a spreadsheet, which would run a text that begins as a formula does."""
    rows = _cost_json(table)["rows"]
    assert isinstance(rows, list)
    file = io.StringIO()
    names = (table.by, "device", "device_s", "wall_s", "num_runs", "num_unknown")
    writer = csv.DictWriter(file, (*names, "before_device_s", "num_before", "change"))
    writer.writeheader()
    for row in rows:
        assert isinstance(row, dict)
        name = str(row[table.by])
        writer.writerow(
            {**row, table.by: f"'{name}" if name.startswith(tuple("=+-@\t\r")) else name}
        )
    return file.getvalue()


def _cost_page(tables: Sequence[_CostTable]) -> str:
    items = tables[0]
    grown = [
        r for r in items.rows if r.extra_s > 0 and r.change is not None and r.change >= _DEARER
    ]
    dearer = replace(items, rows=tuple(sorted(grown, key=lambda row: -row.extra_s)))
    return render(
        "cost.html", head=_HEAD, tables=tables, dearer=dearer, unknown=_unknown_line(items)
    )

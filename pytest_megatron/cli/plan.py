"""`pytest-megatron plan` and `changed`: the jobs of CI with their commands, and what changed.

`plan --replay` shows what leaving out unchanged items would have saved and missed.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path

import click
from click.core import ParameterSource
from typing_extensions import TypedDict, Unpack

from pytest_megatron.base.files import JsonValue, read_text
from pytest_megatron.base.text import columns, counted, printable
from pytest_megatron.changed.record import FILE_NAME, merge_records, read_record, write_record
from pytest_megatron.changed.replay import ReplayedCommit, ReplayReport, replay
from pytest_megatron.changed.select import unaffected_since
from pytest_megatron.ci.decide import (
    PathChange,
    Trigger,
    changes_since,
    parse_changes,
    parse_labels,
)
from pytest_megatron.ci.plan import BrokenRecipesError, CiPlan, PlanRequest, make_plan
from pytest_megatron.ci.plan_text import as_text, github_outputs, matrix_problem, outputs_text
from pytest_megatron.cli.formats import EXIT_UNUSABLE, PATH, echo_error, echo_json, format_option
from pytest_megatron.culprit.search import SHORT
from pytest_megatron.errors import ConfigError, EmptySelectionError, SelectionError
from pytest_megatron.recipe.expand import Profile
from pytest_megatron.recipe.model import CADENCES
from pytest_megatron.runs import history
from pytest_megatron.runs.layout import OWN_DIR

EXIT_EMPTY = 5  # as pytest's for no tests
OUTPUT_VARIABLE = "GITHUB_OUTPUT"
_OF_REPLAY = frozenset(("replay", "history", "changed_file", "explain", "form"))
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
    history: tuple[Path, ...]
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
@click.option("--cadence", type=click.Choice(CADENCES), help="What a schedule is for.")
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
@click.option("--recipe-profile", type=click.Choice([p.value for p in Profile]))
@click.option("--only", type=click.Choice(list(_KINDS)), default="all", show_default=True)
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
    "--history",
    multiple=True,
    type=PATH,
    metavar="FILE",
    help="For --replay: the file that runs append to, repeatable; the project's by default.",
)
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
    if given["history"]:
        raise SelectionError("--history", "is for --replay; give the number of commits")
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
        is_suggestion_applied=given["apply_suggestion"],
        is_empty_allowed=given["allow_empty"],
    )


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
    entries = _read_history(given["history"])
    outcomes, durations = history.outcomes_by_commit(entries), history.durations_of(entries)
    found = replay(Path.cwd(), number, records, outcomes, durations)
    if given["form"] == "json":
        echo_json(_replay_as_json(found, is_explained=given["explain"]))
        return
    for line in _replay_lines(found, number, is_explained=given["explain"]):
        click.echo(printable(line))


def _read_history(files: tuple[Path, ...]) -> list[history.HistoryEntry]:
    entries: list[history.HistoryEntry] = []
    for file in files or (OWN_DIR / history.FILE_NAME,):
        if files and not file.exists():
            raise ConfigError(str(file), "is not there, expected a history of runs")
        try:
            found = history.read(file)
        except OSError as error:
            raise ConfigError(str(file), f"cannot be read: {error.strerror}") from error
        for problem in found.problems:
            click.echo(printable(problem), err=True)
        entries += found.entries
    return entries


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


@click.group(name="changed")
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

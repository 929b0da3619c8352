"""`pytest-megatron plan`: jobs of CI."""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import click

from pytest_megatron.base.command import (
    EXIT_UNUSABLE,
    PATH,
    echo_error,
    format_option,
)
from pytest_megatron.base.files import JsonValue, read_json
from pytest_megatron.base.text import counted, grouped, listed, nodes_by_ranks
from pytest_megatron.ci.decide import (
    Trigger,
    changes_since,
    parse_labels,
)
from pytest_megatron.ci.jobs import CiJob, LeftOut, integration_matrix, unit_matrix
from pytest_megatron.ci.plan import BrokenRecipesError, CiPlan, PlanRequest, make_plan
from pytest_megatron.errors import EmptySelectionError, SelectionError
from pytest_megatron.workloads.recipe.expand import Profile
from pytest_megatron.workloads.recipe.model import CADENCES

EXIT_EMPTY = 5  # as pytest's for no tests
OUTPUT_VARIABLE = "GITHUB_OUTPUT"
_KINDS = {"workloads": ("workload",), "units": ("unit",), "all": ("workload", "unit")}


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
@click.option(
    "--platform", "platforms", multiple=True, metavar="LIST", help="Only jobs for this hardware."
)
@click.option(
    "--model", "models", multiple=True, metavar="LIST", help="Only workloads of this model."
)
@click.option(
    "--test-case",
    "test_cases",
    multiple=True,
    metavar="LIST",
    help="Only workloads of this test case.",
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
@click.option("--gpus", type=click.IntRange(min=0), default=0, help="Of each shard's gang.")
@click.option("--ranks", type=click.IntRange(min=0), default=0, help="The same on the CPU.")
@click.option("--diff", metavar="REV", help="Suggest a label for what changed since REV.")
@click.option("--apply-suggestion", is_flag=True, help="Plan as if that label were attached.")
@click.option("--explain", is_flag=True, help="Print why each rule and row is in or out.")
@click.option("--allow-empty", is_flag=True, help="A plan without jobs is no error.")
@format_option(
    "text", "json", "github", about=f"github appends step outputs to ${OUTPUT_VARIABLE}."
)
def command(  # noqa: PLR0913 - one for each option
    *,
    labels: str,
    event: str,
    ref: str,
    cadence: str | None,
    environment: str | None,
    platforms: tuple[str, ...],
    models: tuple[str, ...],
    test_cases: tuple[str, ...],
    tag: str | None,
    recipes: tuple[Path, ...],
    recipe_profile: str | None,
    only: str,
    shards: int | None,
    gpus: int,
    ranks: int,
    diff: str | None,
    apply_suggestion: bool,
    explain: bool,
    allow_empty: bool,
    form: str,
) -> None:
    """Print the CI jobs for labels and an event, with the exact command of each.

    Run it from the project's root. Exits with 5 if nothing is selected, with 2 if the labels, the
    event, a recipe or the project's table are unusable.
    """
    if gpus and ranks:
        raise SelectionError("--gpus", "--ranks is given as well; give one of them")
    root = Path()
    request = PlanRequest(
        root=root,
        trigger=Trigger(
            event=event,
            labels=parse_labels(labels),
            ref=ref,
            cadence=cadence,
            environment=environment,
        ),
        recipes=recipes,
        profile=None if recipe_profile is None else Profile(recipe_profile),
        platforms=_split(platforms),
        models=_split(models),
        test_cases=_split(test_cases),
        tag=tag,
        kinds=_KINDS[only],
        num_shards=shards,
        gpus=gpus,
        ranks=ranks or gpus,
        changes=None if diff is None else changes_since(root, diff),
        is_suggestion_applied=apply_suggestion,
        is_empty_allowed=allow_empty,
        is_of_fork=_is_of_fork(),
    )
    try:
        plan = make_plan(request)
    except BrokenRecipesError as broken:
        for finding in broken.findings:
            echo_error(finding)
        sys.exit(EXIT_UNUSABLE)
    except EmptySelectionError as error:
        echo_error(error)
        if explain:
            empty = make_plan(replace(request, is_empty_allowed=True))
            click.echo(as_text(empty, is_explained=True), nl=False, err=True)
        sys.exit(EXIT_EMPTY)
    _FORMS[form](plan, is_explained=explain)


def _is_of_fork() -> bool:
    """Return whether GitHub runs this for a pull request of another repository."""
    try:
        event = read_json(Path(os.environ.get("GITHUB_EVENT_PATH", "")))
    except (OSError, ValueError):
        return False
    pull = event.get("pull_request") if isinstance(event, dict) else None
    head = pull.get("head") if isinstance(pull, dict) else None
    if not isinstance(head, dict):
        return False
    repo = head.get("repo")  # null where the fork is gone
    name = repo.get("full_name") if isinstance(repo, dict) else None
    return name != os.environ.get("GITHUB_REPOSITORY")


def _split(lists: tuple[str, ...]) -> tuple[str, ...]:
    """Return the words of lists with commas; empty words are none."""
    return tuple(word.strip() for text in lists for word in text.split(",") if word.strip())


def _print_text(plan: CiPlan, *, is_explained: bool) -> None:
    click.echo(as_text(plan, is_explained=is_explained), nl=False)


def _print_json(plan: CiPlan, *, is_explained: bool) -> None:
    """Print a plan as JSON."""
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


MAX_MATRIX = 256  # jobs of one matrix; GitHub refuses more
MAX_SHOWN = 3  # rows of one reason


def as_text(plan: CiPlan, *, is_explained: bool = False) -> str:
    """Return the plan for people: each job, its reason and its command."""
    lines = list(_header(plan))
    unjudged = [job for job in plan.jobs if job.compared is False]
    if unjudged and not plan.decision.is_lightweight:
        num_rows = len(plan.workloads)
        lines.append(
            f"{len(unjudged)} of {counted(num_rows, 'workload')} "
            f"{'is' if len(unjudged) == 1 else 'are'} compared with no golden, because of the case"
        )
    if is_explained:
        lines += ["", "rules, the first that holds decides:"]
        for one in plan.decision.considered:
            lines.append(f"  {'->' if one.decides else '  '} {one.rule}: {one.why}")
    for kind, title, rest in (
        ("workload", "workload", ""),
        ("unit", "job", " of unit tests"),
    ):
        jobs = [job for job in plan.jobs if job.kind == kind]
        if not jobs:
            continue
        lines += ["", counted(len(jobs), title) + rest]
        lines += [line for job in jobs for line in _job_lines(job)]
    if not plan.jobs:
        lines += ["", "no jobs"]
    if is_explained:
        lines += ["", *_left_out_lines(plan.left_out)]
    return "".join(f"{line}\n" for line in lines)


def _header(plan: CiPlan) -> Iterator[str]:
    """Yield the first lines of a plan: the decision and its reason."""
    decision = plan.decision
    kind = "lightweight" if decision.is_lightweight else "full"
    yield (
        f"scope {','.join(decision.scope)}, cadence {','.join(decision.cadence) or 'any'}, "
        f"{counted(decision.n_repeat, 'repeat')}, {kind}, environment {decision.environment}, "
        f"platform {','.join(plan.platforms) or 'any'}, image {decision.image}"
    )
    yield f"because of {decision.reason}"
    for line in decision.label_effects:
        yield f"label {line}"
    for label in decision.unknown_labels:
        yield f"label {label}: nothing here reads it"
    if (found := plan.suggestion) is not None:
        labels = " and ".join(map(repr, found.labels)) or "none"
        yield f"label for these changes: {labels}, {found.reason}"


def _job_lines(job: CiJob) -> Iterator[str]:
    """Yield the lines of a job: its size, and its command."""
    ranks = nodes_by_ranks(job.nodes, job.ranks) if job.ranks else "ranks of pytest's settings"
    files = f", {counted(job.num_files, 'file')}" if job.kind == "unit" else ""
    judged = ", not compared" if job.compared is False and not job.lightweight else ""
    yield f"  {job.name}  {ranks}{files}, at most {job.timeout_minutes} min{judged}"
    yield f"    {job.command}"


def _left_out_lines(left_out: Sequence[LeftOut]) -> Iterator[str]:
    """Yield the rows that were left out, by reason."""
    yield f"left out: {counted(len(left_out), 'row')}"
    by_reason = grouped(("; ".join(one.reasons), one.name) for one in left_out)
    for reason, names in sorted(by_reason.items(), key=lambda item: (-len(item[1]), item[0])):
        yield f"  {len(names)}: {reason}: {listed(names, MAX_SHOWN)}"


def github_outputs(plan: CiPlan) -> dict[str, str]:
    """Return the outputs of a step; lists and matrices are JSON on one line."""
    decision = plan.decision
    kinds = Counter(job.kind for job in plan.jobs)
    return {
        "scope": ",".join(decision.scope),
        "cadence": ",".join(decision.cadence),
        "n_repeat": str(decision.n_repeat),
        "lightweight": _word(decision.is_lightweight),
        "environment": decision.environment,
        "platform": ",".join(plan.platforms),
        "image": decision.image,
        "reason": decision.reason,
        "suites": _line(list(decision.suites)),
        "suggested_label": (plan.suggestion.label or "") if plan.suggestion else "",
        "docs_only": _word(plan.suggestion is not None and plan.suggestion.docs_only),
        "has_workloads": _word(kinds["workload"] > 0),
        "has_units": _word(kinds["unit"] > 0),
        "integration-tests": _line(integration_matrix(plan.jobs)),
        "unit-tests": _line(unit_matrix(plan.jobs)),
        **{
            f"{kind}_jobs": _line([asdict(j) for j in plan.jobs if j.kind == kind])
            for kind in ("workload", "unit")
        },
    }


def outputs_text(outputs: Mapping[str, str]) -> str:
    """Return outputs as `$GITHUB_OUTPUT` takes them; a value may have several lines.

    The word that ends a value is random: a value that contained it, such as a label of a pull
    request, could set any other output.
    """
    parts = []
    for name, value in outputs.items():
        end = f"end-{secrets.token_hex(16)}"
        parts.append(f"{name}<<{end}\n{value}\n{end}\n")
    return "".join(parts)


def matrix_problem(plan: CiPlan) -> str | None:
    """Return why GitHub would refuse the plan's matrices, None if it takes them."""
    for kind, number in Counter(job.kind for job in plan.jobs).items():
        if number > MAX_MATRIX:
            return (
                f"{number} {kind} jobs, a matrix of GitHub takes {MAX_MATRIX}; "
                f"plan one platform at a time with --platform, or fewer --shards"
            )
    return None


def _word(is_true: bool) -> str:  # noqa: FBT001 - a value, not a choice
    return "true" if is_true else "false"


def _line(value: list[str] | list[JsonValue] | list[dict[str, JsonValue]]) -> str:
    return json.dumps(value, separators=(",", ":"))

"""The plan of a CI run: the decision, the rows, a job for each, and the rows that are left out."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from pytest_megatron.base.files import JsonValue
from pytest_megatron.base.findings import Finding
from pytest_megatron.base.project import load_config
from pytest_megatron.base.text import counted
from pytest_megatron.base.yaml import YamlError, read_document
from pytest_megatron.ci.decide import PathChange, Suggestion, Trigger, decide, suggest
from pytest_megatron.ci.jobs import (
    CiJob,
    LeftOut,
    UnitChoice,
    UnitJobs,
    bucket_jobs,
    integration_matrix,
    refuse_own_runners,
    shard_jobs,
    unit_matrix,
    unit_rows,
    workload_jobs,
)
from pytest_megatron.ci.table import CiTable, load_table
from pytest_megatron.ci.test_files import find_test_files, read_durations
from pytest_megatron.errors import EmptySelectionError, RecipeError
from pytest_megatron.session.decision import Decision
from pytest_megatron.workloads.recipe.case import case_path, sound_case
from pytest_megatron.workloads.recipe.expand import Profile
from pytest_megatron.workloads.recipe.load import read_recipes
from pytest_megatron.workloads.recipe.megatron_row import native_rows
from pytest_megatron.workloads.recipe.model import (
    UNIT_MODEL,
    Filters,
    Vocabulary,
    Workload,
    failing,
    project_words,
    select,
    values,
)

HISTORY = Path(".pytest_megatron/history.jsonl")
_NAMED = {"model": "model", "test_case": "test case"}  # too many to tell rows apart by


class BrokenRecipesError(RecipeError):
    """Recipes have errors; all of them are in `findings`."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        super().__init__(findings[0].where, findings[0].message)
        self.findings = tuple(findings)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """The options of a plan.

    Attributes:
        root: The project's; `recipes` and test files are found from here.
        recipes: Files and directories; empty leaves it to the table.
        profile: None leaves it to the table.
        platforms, models, test_cases: Empty is any.
        tag: None leaves it to the table.
        kinds: Out of `workload` and `unit`.
        num_shards: None makes jobs of the buckets that recipes name.
        changes: Changed paths, None where they are not known.
        is_suggestion_applied: Whether the label that the paths suggest counts as attached.
        is_empty_allowed: Whether a plan without jobs is no error.
        is_of_fork: Whether it is for a pull request of another repository.
    """

    root: Path
    trigger: Trigger
    recipes: tuple[Path, ...] = ()
    profile: Profile | None = None
    platforms: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    test_cases: tuple[str, ...] = ()
    tag: str | None = None
    kinds: tuple[str, ...] = ("workload", "unit")
    num_shards: int | None = None
    gpus: int = 0
    ranks: int = 0
    changes: tuple[PathChange, ...] | None = None
    is_suggestion_applied: bool = False
    is_empty_allowed: bool = False
    is_of_fork: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CiPlan:
    """The rows and jobs that CI runs.

    Attributes:
        workloads: The rows that run, in the order of the recipes.
        jobs: One for each row, then one for each bucket or shard.
        left_out: Every other row, with its reasons.
    """

    trigger: Trigger
    decision: Decision
    platforms: tuple[str, ...]
    workloads: tuple[Workload, ...]
    jobs: tuple[CiJob, ...]
    left_out: tuple[LeftOut, ...]
    suggestion: Suggestion | None

    def as_json(self, *, is_explained: bool = False) -> dict[str, JsonValue]:
        """Return the plan for `plan --format json`; words of a list are joined with commas."""
        decision = self.decision
        found: dict[str, JsonValue] = {
            "schema": 1,
            "event": self.trigger.event,
            "labels": list(self.trigger.labels),
            "scope": ",".join(decision.scope),
            "cadence": ",".join(decision.cadence),
            "n_repeat": decision.n_repeat,
            "lightweight": decision.is_lightweight,
            "environment": decision.environment,
            "platform": ",".join(self.platforms),
            "image": decision.image,
            "suites": list(decision.suites),
            "rule": decision.rule,
            "reason": decision.reason,
            "label_effects": list(decision.label_effects),
            "unknown_labels": list(decision.unknown_labels),
            "suggestion": None if self.suggestion is None else asdict(self.suggestion),
            "workloads": [_row(workload) for workload in self.workloads],
            "jobs": [asdict(job) for job in self.jobs],
            "matrix": {
                "unit": unit_matrix(self.jobs),
                "integration": integration_matrix(self.jobs),
            },
        }
        if is_explained:
            found["rules"] = [asdict(one) for one in decision.considered]
            found["left_out"] = [
                {"id": one.name, "reasons": list(one.reasons)} for one in self.left_out
            ]
        return found


def make_plan(request: PlanRequest) -> CiPlan:
    """Return the plan of a CI run.

    Raises:
        ConfigError: The project's table is wrong.
        BrokenRecipesError: Recipes have errors.
        RecipeError: Buckets do not hold every test file once, or recipes are not there.
        SelectionError: The event or a word is unknown, nothing is selected, or a job of a fork is
            for a runner of the project.
    """
    config = load_config(request.root)
    words = project_words(request.root)
    table = load_table(config, words)
    trigger, suggestion = _with_suggestion(request, table)
    decision = decide(trigger, table)
    rows = _read_rows(request, table, words)
    workloads: tuple[Workload, ...] = ()
    jobs: list[CiJob] = []
    left_out: list[LeftOut] = []
    units = UnitJobs()
    empty: EmptySelectionError | None = None
    if "workload" in request.kinds:
        workloads, left_out, empty = _select(rows, request, decision, words, table)
        jobs += workload_jobs(workloads, decision, table, partial(_is_compared, request.root))
    if "unit" in request.kinds:
        try:
            units = _unit_jobs(unit_rows(rows), request, decision, table)
        except EmptySelectionError as error:
            raise (empty or error) from None
        jobs += units.jobs
        left_out += units.left_out
    if not jobs and not request.is_empty_allowed:
        problem = "has no jobs, expected some; there are no recipes with rows; is this the root?"
        raise empty or EmptySelectionError("the plan", problem)
    if request.is_of_fork:
        refuse_own_runners(jobs, table)
    return CiPlan(
        trigger=trigger,
        decision=decision,
        platforms=request.platforms,
        workloads=workloads,
        jobs=tuple(jobs),
        left_out=tuple(left_out),
        suggestion=suggestion,
    )


def _with_suggestion(request: PlanRequest, table: CiTable) -> tuple[Trigger, Suggestion | None]:
    """Return the trigger, with the suggested label if that is to be applied."""
    trigger = request.trigger
    if request.changes is None:
        return trigger, None
    suggestion = suggest(request.changes, table)
    if not request.is_suggestion_applied:
        return trigger, suggestion
    labels = tuple(dict.fromkeys((*trigger.labels, *suggestion.labels)))
    return replace(trigger, labels=labels), suggestion


def _read_rows(
    request: PlanRequest, table: CiTable, vocabulary: Vocabulary
) -> tuple[Workload, ...]:
    """Return the rows of all recipes.

    A project without the table's own folders of recipes has none; given paths must be there.
    """
    given = request.recipes or tuple(request.root / name for name in table.recipes)
    paths = given if request.recipes else [p for p in given if p.exists()]
    loaded = read_recipes(paths, request.profile or table.profile, vocabulary)
    errors = [error for one in loaded for error in one.errors]
    if errors:
        raise BrokenRecipesError(errors)
    return tuple(row for one in loaded for row in _as_started(one.workloads, request.root))


def _as_started(rows: tuple[Workload, ...], root: Path) -> tuple[Workload, ...]:
    """Return rows of a recipe with the ranks and repeats that Megatron-LM's driver starts."""
    try:
        return native_rows(rows, os.environ, root)
    except RecipeError:  # its jobs say what is wrong with a script
        return rows


_ONLY_TESTS = (
    "for test files without recipes give --shards N --ranks M, in CI as plan = "
    '["--shards", "N", "--ranks", "M"] in [tool.pytest-megatron.ci.workflow]'
)


def _select(
    rows: Sequence[Workload],
    request: PlanRequest,
    decision: Decision,
    vocabulary: Vocabulary,
    table: CiTable,
) -> tuple[tuple[Workload, ...], list[LeftOut], EmptySelectionError | None]:
    """Return the rows that run, why the others do not, and the error if there is no other job.

    Raises:
        SelectionError: None runs, and that is not allowed, or others were asked for by name.
    """
    trainings = [row for row in rows if row.model != UNIT_MODEL]
    if not trainings and ("unit" in request.kinds and (rows or request.num_shards)):
        return (), [], None
    filters: Filters = {
        "scope": decision.scope,
        "cadence": decision.cadence,
        "environment": (decision.environment,),
        "platform": request.platforms,
        "model": request.models,
        "test_case": request.test_cases,
        "tag": () if request.tag is None else (request.tag,),
    }
    empty: EmptySelectionError | None = None
    try:
        selected = select(trainings, filters, vocabulary)
    except EmptySelectionError as error:
        selected = ()
        if not request.is_empty_allowed:
            hint = _scopes_with_rows(trainings, decision, table) if rows else _ONLY_TESTS
            empty = EmptySelectionError(error.where, f"{error.problem}; {hint}")
            if "unit" not in request.kinds or request.models or request.test_cases or request.tag:
                raise empty from None
    chosen = set(map(id, selected))
    left_out = [_left_out(row, filters) for row in trainings if id(row) not in chosen]
    return selected, left_out, empty


def _scopes_with_rows(rows: Sequence[Workload], decision: Decision, table: CiTable) -> str:
    """Return the scopes that the rule asks for, those of rows, and those of all rules."""
    numbers = Counter(row.scope for row in rows if row.disabled_reason is None)
    asked = f"rule {decision.rule!r} asks for scope {','.join(decision.scope)}"
    if not numbers:
        return f"{asked}, and every row is disabled"
    found = ", ".join(f"{scope} ({number})" for scope, number in sorted(numbers.items()))
    known = ", ".join(sorted({scope for rule in table.rules for scope in rule.scope}))
    return f"{asked}; rows have {found}, the rules of CI {known}"


def _is_compared(root: Path, workload: Workload) -> bool | None:
    """Return whether a case is compared with a golden; None where there is none to read."""
    if workload.script is not None and not workload.calls_driver:
        return False
    try:
        case = sound_case(workload.own_case or read_document(case_path(root, workload)))
    except YamlError:  # `lint` reports it
        return None
    return case is not None and case.needs_golden


def _left_out(row: Workload, filters: Filters) -> LeftOut:
    """Return the reasons against a row; that it is disabled comes first, and alone."""
    reasons = [] if row.disabled_reason is None else [row.disabled_reason]
    if not reasons:
        missed = failing(row, filters)
        reasons = [f"not the {_NAMED[name]} that is asked for" for name in missed if name in _NAMED]
        reasons += [
            f"{name} {','.join(values(row, name)) or '-'}, asked {','.join(filters[name])}"
            for name in missed
            if name not in _NAMED
        ]
    return LeftOut(name=row.node_id, reasons=tuple(reasons))


def _unit_jobs(
    rows: Sequence[Workload], request: PlanRequest, decision: Decision, table: CiTable
) -> UnitJobs:
    """Return the jobs of unit tests.

    Raises:
        SelectionError: There are rows of unit tests, and none is asked for.
    """
    tag = table.tag if request.tag is None else request.tag
    choice = UnitChoice(
        environment=decision.environment,
        platforms=request.platforms,
        tag=tag,
        is_selective=decision.is_selective,
    )
    if request.num_shards is not None:
        files = find_test_files(request.root, table.unit_tests)
        row = CiJob(
            id="shard",
            environment=decision.environment,
            platform=request.platforms[0] if len(request.platforms) == 1 else "",
            gpus=request.gpus,
            ranks=request.ranks,
        )
        durations = read_durations(request.root / HISTORY, files)
        return shard_jobs(request.root, request.num_shards, durations, row, choice, table)
    found = bucket_jobs(rows, choice, table, request.root) if rows else UnitJobs()
    is_empty = not found.jobs and (bool(rows) or request.kinds == ("unit",))
    if is_empty and not request.is_empty_allowed:
        where = f"--environment {choice.environment}" + (f" --tag {tag}" if tag else "")
        where += f" --platform {','.join(choice.platforms)}" if choice.platforms else ""
        nearest = f"; {found.left_out[0].name}: {found.left_out[0].reasons[0]}" if rows else ""
        raise EmptySelectionError(
            where,
            f"matches none of {counted(len(rows), 'row')} of unit tests{nearest}; "
            f"give --shards to share files out without rows",
        )
    return found


def _row(workload: Workload) -> dict[str, JsonValue]:
    """Return a workload as the plan's JSON has it."""
    return {
        "id": workload.node_id,
        "file": workload.file.as_posix(),
        "line": workload.line,
        "model": workload.model,
        "test_case": workload.test_case,
        "environment": workload.environment,
        "platform": workload.platform,
        "scope": workload.scope,
        "cadence": list(workload.cadence),
        "tag": workload.tag,
        "nodes": workload.nodes,
        "gpus": workload.gpus,
        "n_repeat": workload.n_repeat,
        "time_limit": workload.time_limit_s,
        "spec": dict(workload.spec),
    }

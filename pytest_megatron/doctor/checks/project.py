"""The project against the environment, and what its recipes need."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pytest_megatron.base.text import listed
from pytest_megatron.doctor.checks.packages import fitting
from pytest_megatron.doctor.facts import Compiled, EnvironmentFacts, SystemView, compat
from pytest_megatron.errors import CaseError, EmptySelectionError
from pytest_megatron.gpu.host import CPU_PLATFORM, Host
from pytest_megatron.workloads.recipe.case import Launcher, WorkloadCase, case_of, case_path
from pytest_megatron.workloads.recipe.expand import Profile
from pytest_megatron.workloads.recipe.load import find_recipes, load_recipe
from pytest_megatron.workloads.recipe.megatron_row import native_rows
from pytest_megatron.workloads.recipe.model import UNIT_MODEL, Workload, project_words
from pytest_megatron.workloads.training.checks.layout import hits_of
from pytest_megatron.workloads.training.checks.rules import RuleMatch
from pytest_megatron.workloads.training.plan.plan import LAUNCHER_VARIABLE


def check_project(facts: EnvironmentFacts, system: SystemView) -> Iterator[RuleMatch]:
    """Yield what is wrong between the project and the environment."""
    active = system.env.get("VIRTUAL_ENV")
    if active and Path(active).resolve() != facts.python.prefix.resolve():
        yield RuleMatch("another-environment", active=active, prefix=facts.python.prefix)
    if facts.git_fix is not None:
        yield RuleMatch("git-owner", project=system.project, fix=facts.git_fix)


_MOST_ROWS = 3
_FT_DISTRIBUTION = "nvidia-resiliency-ext"


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Selection of a recipe's rows.

    Attributes:
        rows: The workloads that CI would run.
        root: The directory with the test cases.
    """

    rows: tuple[Workload, ...]
    root: Path


def read_needs(recipe: Path, root: Path, platforms: Iterable[str] = ()) -> Needs:
    """Read the rows of a recipe, or of all recipes in a directory.

    Raises:
        RecipeError: There is no such recipe, or it has an error.
        EmptySelectionError: No row is left.
    """
    words, chosen = project_words(root), frozenset(platforms)
    loaded = [
        row
        for file in find_recipes([recipe])
        for row in native_rows(load_recipe(file, Profile.STRICT, words), os.environ, root)
        if row.model != UNIT_MODEL
    ]
    rows = tuple(
        row
        for row in loaded
        if row.disabled_reason is None and (not chosen or row.platform in chosen)
    )
    if not rows:
        there = ", ".join(sorted({row.platform for row in loaded})) or "no row at all"
        raise EmptySelectionError(
            str(recipe), f"no row is left to be checked, expected a platform of {there}"
        )
    return Needs(rows=rows, root=root)


def check_recipe(facts: EnvironmentFacts, system: SystemView, needs: Needs) -> Iterator[RuleMatch]:
    """Yield what rows need and this environment does not have; equal wants are one finding."""
    found: dict[tuple[str, ...], tuple[RuleMatch, list[str]]] = {}
    for row in needs.rows:
        for hit in _row(row, facts, system, needs.root):
            values = (f"{name}={value}" for name, value in sorted(hit.values.items()))
            key = (hit.rule, hit.where or "", *values)
            found.setdefault(key, (hit, []))[1].append(row.item_name)
    for hit, names in found.values():
        rows = listed(names, _MOST_ROWS)
        if hit.where is None:
            yield RuleMatch(hit.rule, rows=rows, **hit.values)
        else:  # of the checks of workloads
            yield RuleMatch(hit.rule, f"{hit.where} ({rows})", **hit.values)


def _row(
    row: Workload, facts: EnvironmentFacts, system: SystemView, root: Path
) -> Iterator[RuleMatch]:
    """Check what a row of a recipe needs against this machine."""
    host = Host(gpus=facts.devices.gpus, driver=facts.devices.driver, cpu="")
    if lacks := host.lacks(row.platform, row.gpus * row.nodes):
        yield RuleMatch("recipe-gpus", lacks=lacks)
    if row.nodes > 1 and row.platform != CPU_PLATFORM and "sbatch" not in facts.slurm.programs:
        yield RuleMatch("recipe-nodes", nodes=row.nodes)
    yield from _paths(row, root)
    build = row.spec.get("build")
    if isinstance(build, str) and facts.machine.container is None and row.platform != CPU_PLATFORM:
        yield RuleMatch("recipe-image", image=build)
    path = case_path(root, row)
    if not path.is_file():
        if row.script is None:
            yield RuleMatch("recipe-data", key="test case", path=path)
        return
    try:
        case = case_of(root, row)
    except CaseError as problem:
        yield RuleMatch("recipe-case", problem=problem)
        return
    yield from _case(row, case, facts, system.env)


def _paths(row: Workload, root: Path) -> Iterator[RuleMatch]:
    """Yield the paths that a row names and that are not there; those with variables are skipped."""
    paths = {
        "data_path": row.data_path,
        "checkpoint_load_path": row.checkpoint_load_path,
        "training_script_path": row.training_script_path,
    }
    for key, path in paths.items():
        if path and not set(path) & set("{}$") and not (root / path).exists():
            yield RuleMatch("recipe-data", key=key, path=path)


def _case(
    row: Workload, case: WorkloadCase, facts: EnvironmentFacts, env: Mapping[str, str]
) -> Iterator[RuleMatch]:
    """Check the case of a row: its launcher, sizes and packages."""
    starter = env.get(LAUNCHER_VARIABLE) or case.starter.value
    if starter == Launcher.FT_LAUNCHER.value and _FT_DISTRIBUTION not in facts.packages:
        yield RuleMatch("recipe-launcher", launcher=starter, package=_FT_DISTRIBUTION)
    yield from hits_of(row, case, env)
    for compiled in compat().compiled:
        if {compiled.name, *compiled.also} & facts.packages.keys():
            continue
        if (argument := _needed_by(compiled, case)) is not None:
            fits = fitting(compiled, facts)
            yield RuleMatch(
                "recipe-package",
                argument=argument,
                package=compiled.name,
                fits=fits,
                source=compiled.source,
            )


def _needed_by(compiled: Compiled, case: WorkloadCase) -> str | None:
    """Return the argument of a case that needs a package."""
    for needed in compiled.needs:
        option, _, value = needed.partition(" ")
        text = case.argument(option)
        if text is not None and (not value or text == value):
            return needed
    return None

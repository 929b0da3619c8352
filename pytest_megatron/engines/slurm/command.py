"""`pytest-megatron sbatch`: a workload as a job of Slurm."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from typing_extensions import TypedDict, Unpack

from pytest_megatron.base.command import PATH, echo_error
from pytest_megatron.base.findings import as_error
from pytest_megatron.base.project import load_config
from pytest_megatron.base.text import listed, nearest
from pytest_megatron.engines.config import LaunchMode, SlurmConfig, read_slurm_config
from pytest_megatron.engines.multitask.step import MODE, PORTS, REPEATABLE
from pytest_megatron.engines.slurm.checks import SlurmChecks
from pytest_megatron.engines.slurm.script import ScriptWriter, make_scripts
from pytest_megatron.engines.slurm.shape import (
    STEP_FLAGS,
    UNSET,
    WORKER,
    ShapePaths,
    container_words,
    flag_words,
    place_flags,
    shape_of,
    step_flags,
    sync_lines,
    sync_script,
)
from pytest_megatron.engines.slurm.submit import RealSlurm
from pytest_megatron.errors import LaunchError, RecipeError, SelectionError
from pytest_megatron.runs.environment import gather_facts
from pytest_megatron.runs.layout import RUNS_DIR, make_own_dir
from pytest_megatron.workloads.engine.api import EngineContext, Resources
from pytest_megatron.workloads.engine.records import JobSpec, write_spec
from pytest_megatron.workloads.recipe.load import default_recipes, find_recipes, read_recipe
from pytest_megatron.workloads.recipe.megatron_row import native_rows
from pytest_megatron.workloads.recipe.model import Workload, project_words
from pytest_megatron.workloads.training.plan.plan import Setting
from pytest_megatron.workloads.verdict.job import CheckedJob, JobOptions, describe_plan, make_job

_WIDTH = 100
_INDENT = "    "


def shell_lines(
    resources: Resources, slurm: SlurmConfig, paths: ShapePaths, inside: Sequence[str]
) -> Iterator[str]:
    """Yield how to get a shell on one node, and what to type in it.

    Args:
        resources: By a workload, one node of it.
        slurm: The settings of the cluster for its platform.
        paths: Paths of the project and the run.
        inside: What runs the workload there.
    """
    flags = place_flags(resources, slurm)
    del flags["ntasks-per-node"]
    flags = _named(flags, paths)
    yield "# a shell on a node with what it needs:"
    yield from _exports(slurm.job_env)
    if slurm.container is not None:
        yield from slurm.setup
    words = [*flag_words(flags), "--ntasks=1", *slurm.sbatch_flags, *_shell(slurm, paths)]
    yield wrapped(["srun", *words])
    yield "# in it:"
    yield from _exports(slurm.env)
    if slurm.container is None:
        yield from slurm.setup
    if slurm.uv_sync is not None:
        yield f"({sync_script(slurm.uv_sync, paths.root)})"
    yield f"cd {shlex.quote(str(paths.root))}"
    yield shlex.join(inside)


def allocation_lines(
    resources: Resources, slurm: SlurmConfig, paths: ShapePaths, notes: Sequence[str]
) -> Iterator[str]:
    """Yield how to get several nodes, and what to type on the first.

    Args:
        resources: Resources of the workload.
        slurm: Settings of the platform.
        paths: Paths of the project and the run.
        notes: Comments on what the tasks do.
    """
    assert slurm.python is not None
    yield "# its nodes:"
    flags = _named(place_flags(resources, slurm), paths)
    yield wrapped(["salloc", *flag_words(flags), *slurm.sbatch_flags])
    yield "# in the shell that this opens:"
    yield UNSET
    yield from _exports(slurm.job_env)
    yield from slurm.setup
    yield from sync_lines(resources, slurm, paths)
    there = container_words(slurm, paths) or (f"--chdir={paths.root}",)
    yield from notes
    task = [slurm.python, "-m", WORKER, str(paths.spec)]
    yield wrapped(["srun", *there, *step_flags(slurm), *STEP_FLAGS, *task])
    yield "# or a shell on the first of them:"
    yield wrapped(["srun", "--nodes=1", "--ntasks=1", *_shell(slurm, paths)])


def _named(flags: Mapping[str, str], paths: ShapePaths) -> dict[str, str]:
    return {"job-name": paths.title, **flags} if paths.title else dict(flags)


def _shell(slurm: SlurmConfig, paths: ShapePaths) -> list[str]:
    return [*container_words(slurm, paths), *step_flags(slurm), "--pty", "bash", "-i"]


def _exports(variables: Mapping[str, str]) -> Iterator[str]:
    for name, value in variables.items():
        yield f"export {name}={shlex.quote(value)}"


def wrapped(words: Sequence[str]) -> str:
    """Return a command, a long one over several lines."""
    lines = [""]
    for word in map(shlex.quote, words):
        if lines[-1].strip() and len(lines[-1]) + len(word) >= _WIDTH:
            lines.append(_INDENT)
        is_first = not lines[-1].strip()
        lines[-1] += word if is_first else f" {word}"
    return " \\\n".join(lines)


_MOST_SHOWN = 5


class _SlurmOptions(TypedDict):
    """The values of the options that choose a workload and its cluster."""

    executor_config: Path | None
    recipes: Path | None
    run_dir: Path | None
    project: Path
    lightweight: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _SlurmItem:
    """A workload, ready to be put into a job.

    Attributes:
        place: The settings of the cluster for its platform.
    """

    checked: CheckedJob
    place: SlurmConfig
    run_dir: Path

    @property
    def spec(self) -> Path:
        """File with the plan and the settings of the job."""
        return self.run_dir / "engine" / "spec.json"

    @property
    def outcome(self) -> Path:
        """File that the job writes at its end."""
        return self.run_dir / "engine" / "outcome.json"

    @property
    def paths(self) -> ShapePaths:
        """Paths that the script of the job uses."""
        return ShapePaths(
            root=self.checked.job.setting.root,
            run_dir=self.run_dir,
            logs=self.run_dir / "engine" / "logs",
            spec=self.spec,
            title=self.checked.job.dirs.root.name,
        )

    def notes(self) -> list[str]:
        """Return comments on the commands and the files of a job."""
        attempt, outcome = _short(self.checked.plan.dirs.root), _short(self.outcome)
        return [
            f"# logs and metrics: {attempt}",
            f"# outcome: {outcome}",
            "# a second start has attempt_2 and outcome-2.json, and so on",
            f"# why it failed: pytest-megatron triage {shlex.quote(attempt)}",
            *self._commands(),
        ]

    def _commands(self) -> Iterator[str]:
        """Yield comments that show the commands of the tasks, without secrets."""
        redactor = self.checked.job.redactor(self.checked.plan)
        is_native = self.place.mode is LaunchMode.SRUN_NATIVE
        who = "each rank" if is_native else "each node"
        for phase in self.checked.plan.phases:
            when = f", {phase.name}" if len(self.checked.plan.phases) > 1 else ""
            words, start = phase.argv, phase.start
            if start is not None:
                words = start.rank_words if is_native else start.launcher_words
            yield f"# {who} runs{when}, with the variables in {_short(self.spec)}:"
            yield from (f"#   {line}" for line in wrapped(redactor.words(words)).splitlines())

    def write(self) -> None:
        """Write the spec of the job.

        Raises:
            LaunchError: The run directory holds an earlier run, or cannot be written.
        """
        if self.checked.plan.dirs.root.exists() or self.outcome.exists():
            raise LaunchError("--run-dir", f"{self.run_dir} holds an earlier run; give another")
        job, root = self.checked.job, self.checked.plan.dirs.root
        facts = gather_facts(job.setting.root)
        description = describe_plan(job, self.checked.plan, facts, repeat=1, number=1)
        spec = JobSpec(
            key=f"{job.dirs.root.name}/{root.relative_to(job.dirs.root)}",
            plan=self.checked.plan,
            outcome=self.outcome,
            root=job.setting.root,
            description=json.dumps(description),
            env=self.place.env,
            watches_gpus=self.checked.needed.gpus_per_node > 0,
            options={MODE: self.place.mode.value, PORTS: self.place.ports, REPEATABLE: "yes"},
        )
        try:
            make_own_dir(self.checked.job.setting.root)
            self.paths.logs.mkdir(parents=True, exist_ok=True)
            write_spec(self.spec, spec)
        except OSError as error:
            where = str(error.filename or self.run_dir)
            raise LaunchError(where, f"{error.strerror}; give another --run-dir") from error


def _short(path: Path) -> str:
    """Return a path as the user would type it here, on one line."""
    text = os.path.relpath(path)
    return repr(str(path) if text.startswith("..") else text)[1:-1]


def _prepare(item: str, given: _SlurmOptions) -> _SlurmItem:
    """Find a workload and plan it; nothing is written.

    Raises:
        MegatronError: There is no such workload, it cannot be planned, or the settings are wrong.
    """
    root = given["project"].resolve()
    words = project_words(root)
    config = read_slurm_config(given["executor_config"], words.platforms)
    workload, node_id = find_workload(item, root, given["recipes"])
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    run_dir = (given["run_dir"] or root / RUNS_DIR / name).resolve()
    context = EngineContext(
        root=root,
        run_dir=run_dir,
        facts=gather_facts(root),
        env=os.environ,
        config_file=given["executor_config"],
    )
    paths = ShapePaths(root=root, run_dir=run_dir, logs=context.engine_dir / "logs")
    writer = ScriptWriter(config, paths, context.engine_dir)
    options = JobOptions(
        setting=Setting(root=root, env=os.environ, is_lightweight=given["lightweight"]),
        run_dir=run_dir,
        project=load_config(root),
    )
    checked = make_job(options, writer, workload, node_id)
    checked.require_runnable()
    for finding in checked.findings:
        echo_error(finding.line)
    _look_at_cluster(context, config, checked)
    place = writer.place(workload.platform)
    return _SlurmItem(checked=checked, place=place, run_dir=run_dir)


def _look_at_cluster(context: EngineContext, config: SlurmConfig, checked: CheckedJob) -> None:
    """Print what a reachable cluster has against the job; it stops nothing."""
    checks = SlurmChecks(config, context, RealSlurm(context.env, context.root).refusal)
    for finding in checks.findings(checked.job.workload, checked.job.setting, checked.needed):
        echo_error(finding.line)


def find_workload(item: str, root: Path, recipes: Path | None) -> tuple[Workload, str]:
    """Return the workload that an item names, and its node id.

    Args:
        item: A node id, `recipes/gpt.yaml::tp2[dev-cpu]`, or its part after `::`.
        root: The project.
        recipes: Where recipes are; None is where those of the project are.

    Raises:
        RecipeError: A recipe cannot be read.
        SelectionError: No workload, or more than one, has that name.
    """
    file, _, name = item.rpartition("::")
    found = list(_rows(root, recipes, file))
    named = [(row, node_id) for row, node_id in found if row.item_name == name]
    if len(named) == 1:
        return named[0]
    where = file or str(recipes or default_recipes(root).relative_to(root))
    if named:
        raise SelectionError(
            item,
            f"is the name of {len(named)} workloads, expected one; "
            f"give one of {', '.join(sorted(node_id for _, node_id in named)[:_MOST_SHOWN])}",
        )
    names = sorted({row.item_name for row, _ in found})
    alike = [one for one in names if one.startswith(f"{name.partition('[')[0]}[")] or names
    raise SelectionError(
        item,
        f"no workload {name!r} in {where}, expected one of {listed(alike, _MOST_SHOWN)}"
        f"{nearest(name, names)}",
    )


def _rows(root: Path, recipes: Path | None, file: str) -> Iterator[tuple[Workload, str]]:
    """Yield the workloads that an item may mean, with their node ids."""
    words = project_words(root)
    if file:
        own = (recipes or root) / file
        files = [own] if recipes is None or own.is_file() else _ending(recipes, file)
    else:
        files = find_recipes([recipes or default_recipes(root)])
    for path in files:
        loaded = read_recipe(path, vocabulary=words)
        if file and loaded.errors:
            raise as_error(loaded.errors)
        for error in loaded.errors:  # of a recipe that nobody named
            echo_error(error)
        try:
            rows = native_rows(() if loaded.errors else loaded.workloads, os.environ, root)
        except RecipeError as problem:
            if file:
                raise
            echo_error(problem)
            continue
        for row in rows:
            whole = Path(os.path.relpath(path, root)).as_posix()
            yield row, f"{whole}::{row.item_name}"


def _ending(recipes: Path, file: str) -> list[Path]:
    """Return the recipes whose path ends like the one that was named."""
    wanted = Path(file).parts
    found = [path for path in find_recipes([recipes]) if path.parts[-len(wanted) :] == wanted]
    if not found:
        raise SelectionError(
            f"--recipes {recipes}",
            f"holds no {file}, expected the recipe that the item is in; name another directory",
        )
    return found


@click.command(name="sbatch")
@click.argument("item")
@click.option("--executor-config", type=PATH, metavar="FILE", help="Settings of the cluster.")
@click.option("--recipes", type=PATH, metavar="DIR", help="Where ITEM is looked for (recipes).")
@click.option("--run-dir", type=PATH, metavar="DIR", help="Where the job writes.")
@click.option("--project", type=PATH, default=Path(), help="The checkout.")
@click.option("--lightweight", is_flag=True, help="4 iterations.")
@click.option(
    "--interactive",
    "is_interactive",
    is_flag=True,
    help="Print how to get the nodes, and the commands to type there, instead.",
)
def sbatch(item: str, *, is_interactive: bool, **given: Unpack[_SlurmOptions]) -> None:
    """Print the script that runs ITEM as a job of Slurm; needs no Slurm and submits nothing.

    ITEM is a node id, recipes/gpt.yaml::tp2[dev-dgx_h200], or its part after ::. The
    settings and results of the job go into a run directory, which is named at the top; there is
    none with --interactive for an item of one node.
    """
    found = _prepare(item, given)
    if is_interactive:
        click.echo("\n".join(_interactive_lines(found, is_lightweight=given["lightweight"])))
        return
    (text,) = make_scripts([shape_of(found.checked.needed, found.place, found.paths)])
    found.write()
    shebang, _, rest = text.partition("\n")
    click.echo(
        "\n".join([shebang, f"# {found.checked.job.node_id}", *found.notes(), rest]), nl=False
    )


def _interactive_lines(found: _SlurmItem, *, is_lightweight: bool) -> Iterable[str]:
    """Yield the commands that get nodes, and those to type there."""
    needed, place = found.checked.needed, found.place
    if needed.num_nodes > 1:
        found.write()
        return allocation_lines(needed, place, found.paths, found.notes())
    assert place.python is not None
    inside = [place.python, "-m", "pytest", "-p", "megatron", found.checked.job.node_id]
    inside += ["--megatron-lightweight"] if is_lightweight else []
    return shell_lines(needed, place, found.paths, inside)

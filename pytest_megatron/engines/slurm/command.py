"""`pytest-megatron sbatch`: a workload as a job of Slurm."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
from typing_extensions import TypedDict, Unpack

from pytest_megatron.base.command import PATH, echo_error
from pytest_megatron.base.findings import as_error
from pytest_megatron.base.project import load_config
from pytest_megatron.base.text import listed, nearest
from pytest_megatron.engines.config import LaunchMode, SlurmConfig, read_slurm_config
from pytest_megatron.engines.multitask.step import MODE, PORTS
from pytest_megatron.engines.slurm.checks import SlurmChecks
from pytest_megatron.engines.slurm.script import ScriptWriter, make_scripts
from pytest_megatron.engines.slurm.shape import ShapePaths, shape_of
from pytest_megatron.engines.slurm.submit import RealSlurm
from pytest_megatron.errors import LaunchError, SelectionError
from pytest_megatron.runs.environment import gather_facts
from pytest_megatron.runs.layout import RUNS_DIR, make_own_dir
from pytest_megatron.workloads.engine.api import EngineContext
from pytest_megatron.workloads.engine.records import JobSpec, write_spec
from pytest_megatron.workloads.recipe.load import read_recipe
from pytest_megatron.workloads.recipe.megatron_row import native_rows
from pytest_megatron.workloads.recipe.model import Workload, project_words
from pytest_megatron.workloads.training.plan.plan import Setting
from pytest_megatron.workloads.verdict.job import CheckedJob, JobOptions, describe_plan, make_job

_MOST_SHOWN = 5


class _SlurmOptions(TypedDict):
    """The values of the options that choose a workload and its cluster."""

    executor_config: Path | None
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
            shown = shlex.join(redactor.words(words)).splitlines()
            yield from (f"#   {line}" for line in shown)

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
            options={MODE: self.place.mode.value, PORTS: self.place.ports},
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
    workload = find_workload(item, root)
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
    checked = make_job(options, writer, workload, item)
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


def find_workload(item: str, root: Path) -> Workload:
    """Return the workload of a node id, `recipes/gpt.yaml::tp2[dev-cpu]`.

    Raises:
        RecipeError: The recipe cannot be read.
        SelectionError: It has no such workload.
    """
    file, _, name = item.rpartition("::")
    if not file:
        raise SelectionError(item, f"is no node id, expected recipes/FILE.yaml::{name}")
    loaded = read_recipe(root / file, vocabulary=project_words(root))
    if loaded.errors:
        raise as_error(loaded.errors)
    rows = {row.item_name: row for row in native_rows(loaded.workloads, os.environ, root)}
    if name not in rows:
        alike = [one for one in sorted(rows) if one.startswith(f"{name.partition('[')[0]}[")]
        raise SelectionError(
            item,
            f"no workload {name!r} in {file}, expected one of "
            f"{listed(alike or sorted(rows), _MOST_SHOWN)}{nearest(name, sorted(rows))}",
        )
    return rows[name]


@click.command(name="sbatch")
@click.argument("item")
@click.option("--executor-config", type=PATH, metavar="FILE", help="Settings of the cluster.")
@click.option("--run-dir", type=PATH, metavar="DIR", help="Where the job writes.")
@click.option("--project", type=PATH, default=Path(), help="The checkout.")
@click.option("--lightweight", is_flag=True, help="4 iterations.")
def sbatch(item: str, **given: Unpack[_SlurmOptions]) -> None:
    """Print the script that runs ITEM as a job of Slurm; needs no Slurm and submits nothing.

    ITEM is a node id, recipes/gpt.yaml::tp2[dev-dgx_h200]. The settings and results of the
    job go into a run directory, which is named at the top.
    """
    found = _prepare(item, given)
    (text,) = make_scripts([shape_of(found.checked.needed, found.place, found.paths)])
    found.write()
    shebang, _, rest = text.partition("\n")
    click.echo(
        "\n".join([shebang, f"# {found.checked.job.node_id}", *found.notes(), rest]), nl=False
    )

"""Makes the Slurm engine of a run: its settings, the scripts of nemo-run, the client's commands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pytest_megatron.engines.api import EngineContext, Resources
from pytest_megatron.engines.config_file import read_slurm_config
from pytest_megatron.engines.slurm.checks import SlurmChecks, ask_slurm, look_around
from pytest_megatron.engines.slurm.commands import RealSlurm
from pytest_megatron.engines.slurm.engine import SlurmEngine
from pytest_megatron.engines.slurm.journal import Journal
from pytest_megatron.engines.slurm.script import ScriptWriter
from pytest_megatron.engines.slurm.shape import ShapePaths
from pytest_megatron.engines.slurm.submit import JobScript, SlurmSettings
from pytest_megatron.recipe.load import project_words
from pytest_megatron.recipe.model import Workload
from pytest_megatron.workload.plan.plan import Setting


def open_slurm(context: EngineContext) -> SlurmEngine:
    """Return the engine of a run; it goes on where an earlier controller of that run ended.

    Raises:
        ConfigError: The settings are wrong.
        LaunchError: Another controller has the run.
    """
    config = read_slurm_config(context.config_file, project_words(context.root).platforms)
    journal = Journal.open(context.engine_dir)
    paths = ShapePaths(root=context.root, run_dir=context.run_dir, logs=context.engine_dir / "logs")
    return SlurmEngine(
        context,
        RealSlurm(context.env, context.root, [journal.descriptor]),
        NemoScripts(ScriptWriter(config, paths, context.engine_dir)),
        SlurmSettings(
            interval_s=config.interval,
            max_jobs=config.max_jobs,
            max_array=config.max_array,
            remembers_s=config.remember_nodes * 3600.0,
            retries_cancelled=config.retry_cancelled,
            retries_timeout=config.retry_timeout,
            checks=SlurmChecks(config, context, look_around(), lambda: ask_slurm(context.env)),
        ),
        journal,
    )


class NemoScripts:
    """The scripts that nemo-run makes, and what the configuration says beside them."""

    def __init__(self, writer: ScriptWriter) -> None:
        self._writer = writer

    def settle(self, setting: Setting, workload: Workload) -> Setting:
        """Return the setting with the jobs' interpreter, and their variables over ours."""
        place = self._writer.place(workload.platform)
        assert place.python is not None
        has_ft = setting.has_ft_launcher or place.python != setting.python  # nobody can look
        env = {**setting.env, **place.env}
        return replace(setting, python=place.python, env=env, has_ft_launcher=has_ft)

    def write(self, wanted: Sequence[Resources]) -> dict[Resources, JobScript]:
        """Return a script for each.

        Raises:
            LaunchError: nemo-run is missing or cannot write one.
        """
        paths = self._writer.write(wanted)
        found = {}
        for needed in wanted:
            place = self._writer.place(needed.platform)
            options = {"mode": place.mode.value, "ports": place.ports}
            found[needed] = JobScript(
                path=paths[needed], exclude=place.exclude, env=place.env, options=options
            )
        return found

"""Makes the Slurm engine of a run: its settings, the scripts of nemo-run, the client's commands."""

from __future__ import annotations

from pytest_megatron.engines.api import EngineContext
from pytest_megatron.engines.config_file import read_slurm_config
from pytest_megatron.engines.slurm.checks import SlurmChecks, ask_slurm, look_around
from pytest_megatron.engines.slurm.commands import RealSlurm
from pytest_megatron.engines.slurm.engine import SlurmEngine
from pytest_megatron.engines.slurm.journal import Journal
from pytest_megatron.engines.slurm.script import ScriptWriter
from pytest_megatron.engines.slurm.shape import ShapePaths
from pytest_megatron.engines.slurm.submit import SlurmSettings
from pytest_megatron.recipe.load import project_words


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
        ScriptWriter(config, paths, context.engine_dir),
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

"""What Slurm would refuse of a workload's job, or its nodes would not see, before a submission.

Source: sbatch(1), --test-only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

from pytest_megatron.engines.config import SlurmConfig
from pytest_megatron.engines.slurm.script import place_of
from pytest_megatron.engines.slurm.shape import flag_words, place_flags
from pytest_megatron.engines.slurm.submit import SlurmAwayError
from pytest_megatron.errors import LaunchError
from pytest_megatron.workloads.engine.api import EngineContext, Resources
from pytest_megatron.workloads.recipe.model import Workload
from pytest_megatron.workloads.training.checks.check import findings_of
from pytest_megatron.workloads.training.checks.rules import CheckFinding, RuleMatch
from pytest_megatron.workloads.training.plan.plan import Setting

_NEMO_HOME = "NEMO_HOME"
# Types of file systems that one machine sees alone; of others the type does not tell.
_LOCAL = frozenset(("ext3", "ext4", "xfs", "btrfs", "zfs", "tmpfs", "ramfs", "overlay"))


class SlurmChecks:
    """The checks of one run; jobs that need the same are tested once."""

    def __init__(
        self,
        config: SlurmConfig,
        context: EngineContext,
        refusal: Callable[[Sequence[str]], str | None],
    ) -> None:
        """Keep how Slurm is asked; nothing is asked yet.

        Args:
            config: The settings.
            context: Context of the run.
            refusal: Returns why sbatch would not take a job of these flags.
        """
        self._config = config
        self._context = context
        self._refusal = refusal
        self._is_away = False
        self._said: dict[Resources, str | None] = {}

    def findings(
        self, workload: Workload, setting: Setting, resources: Resources
    ) -> tuple[CheckFinding, ...]:
        """Return why Slurm would not take the job of a workload now, and what its nodes do not see.

        They are warnings, as Slurm says the same of a job that is too large and of one whose nodes
        are down for a while; only the submission itself tells. So it does where nobody answers.

        Raises:
            LaunchError: The settings ask for what is not there.
        """
        slurm = place_of(self._config, resources.platform, self._context.root)
        if resources not in self._said:
            self._said[resources] = self._ask(resources, slurm)
        said = self._said[resources]
        hits = list(_unshared_nemo_home(workload, setting)) if slurm.container is None else []
        if said is not None:
            where = f"{self._context.config_file or '--executor-config'}: slurm"
            hits.append(RuleMatch("slurm-refuses", where, said=said))
        return findings_of(hits)

    def _ask(self, resources: Resources, slurm: SlurmConfig) -> str | None:
        """Return what Slurm says against a job; None where it says nothing, or nobody answers."""
        if self._is_away:
            return None
        try:
            return self._refusal([*flag_words(place_flags(resources, slurm)), *slurm.sbatch_flags])
        except (SlurmAwayError, LaunchError):
            self._is_away = True
            return None


def _unshared_nemo_home(workload: Workload, setting: Setting) -> Iterator[RuleMatch]:
    """Yield a NEMO_HOME, or its default for a program of NeMo, that only this machine sees."""
    given = setting.env.get(_NEMO_HOME)
    if not given and "nemo" not in (workload.training_script_path or "").lower():
        return
    path = Path(given or Path.home() / ".cache/nemo").resolve()
    mounts = {Path(mount.mountpoint): mount for mount in psutil.disk_partitions(all=True)}
    mount = next((mounts[point] for point in (path, *path.parents) if point in mounts), None)
    if mount is not None and mount.fstype in _LOCAL:
        where = "the environment" if given else "its default"
        yield RuleMatch("nemo-home", where, path=path, kind=mount.fstype, point=mount.mountpoint)

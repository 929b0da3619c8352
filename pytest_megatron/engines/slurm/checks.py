"""What Slurm would refuse of a workload's job, before anything is submitted.

Source: sbatch(1), --test-only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pytest_megatron.engines.slurm.script import place_of
from pytest_megatron.engines.slurm.shape import flag_words, place_flags
from pytest_megatron.engines.slurm.submit import SlurmAwayError
from pytest_megatron.errors import LaunchError
from pytest_megatron.workloads.engine.api import EngineContext, Resources
from pytest_megatron.workloads.engine.config import SlurmConfig
from pytest_megatron.workloads.recipe.model import Workload
from pytest_megatron.workloads.training.checks.check import findings_of
from pytest_megatron.workloads.training.checks.rules import CheckFinding, RuleMatch
from pytest_megatron.workloads.training.plan.plan import Setting


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
        self, _workload: Workload, _setting: Setting, resources: Resources
    ) -> tuple[CheckFinding, ...]:
        """Return why Slurm would not take the job of a workload now.

        It is a warning, as Slurm says the same of a job that is too large and of one whose nodes
        are down for a while; only the submission itself tells. So it does where nobody answers.

        Raises:
            LaunchError: The settings ask for what is not there.
        """
        if resources not in self._said:
            slurm = place_of(self._config, resources.platform, self._context.root)
            self._said[resources] = self._ask(resources, slurm)
        said = self._said[resources]
        if said is None:
            return ()
        where = f"{self._context.config_file or '--executor-config'}: slurm"
        return findings_of([RuleMatch("slurm-refuses", where, said=said)])

    def _ask(self, resources: Resources, slurm: SlurmConfig) -> str | None:
        """Return what Slurm says against a job; None where it says nothing, or nobody answers."""
        if self._is_away:
            return None
        try:
            return self._refusal([*flag_words(place_flags(resources, slurm)), *slurm.sbatch_flags])
        except (SlurmAwayError, LaunchError):
            self._is_away = True
            return None

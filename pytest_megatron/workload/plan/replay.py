"""One attempt of an earlier run, to be done again: which repeat, which phase, on how many ranks.

`pytest-megatron repro` says it in variables, which any pytest run of a workload reads. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pytest_megatron.errors import LaunchError
from pytest_megatron.recipe.model import Workload
from pytest_megatron.workload.plan.plan import AttemptPlan

REPEAT = "PYTEST_MEGATRON_REPEAT"
PHASE = "PYTEST_MEGATRON_PHASE"
RANKS = "PYTEST_MEGATRON_RANKS"
CHECKPOINTS = "PYTEST_MEGATRON_CHECKPOINTS"


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What of a workload is done again.

    Attributes:
        repeat: The first repeat to run, counted from 1; the case may use it as a seed.
        phase: The only phase to run, counted from 1; None runs all.
        num_ranks: Ranks on one node, in place of the row's nodes and GPUs; None leaves those.
        checkpoints: What earlier phases saved, copied before the first phase starts.
    """

    repeat: int = 1
    phase: int | None = None
    num_ranks: int | None = None
    checkpoints: Path | None = None

    @classmethod
    def of(cls, env: Mapping[str, str]) -> Replay:
        """Read the variables.

        Raises:
            LaunchError: A value is no number from 1 on.
        """
        checkpoints = env.get(CHECKPOINTS)
        return cls(
            repeat=_number(env, REPEAT) or 1,
            phase=_number(env, PHASE),
            num_ranks=_number(env, RANKS),
            checkpoints=Path(checkpoints) if checkpoints else None,
        )

    def resized(self, workload: Workload) -> Workload:
        """Return a row with the ranks that were asked for."""
        if self.num_ranks is None:
            return workload
        return replace(workload, nodes=1, gpus=self.num_ranks)

    def cut(self, plan: AttemptPlan, node_id: str) -> AttemptPlan:
        """Return a plan of the one phase that was asked for.

        Raises:
            LaunchError: The workload has no such phase.
        """
        if self.phase is None:
            return plan
        chosen = tuple(phase for phase in plan.phases if phase.number == self.phase)
        if not chosen:
            raise LaunchError(
                PHASE,
                f"is {self.phase}, and {node_id} has {len(plan.phases)} phases; "
                f"expected 1 to {len(plan.phases)}",
            )
        return replace(plan, phases=chosen, target=None, start_from=self.checkpoints)


def _number(env: Mapping[str, str], name: str) -> int | None:
    text = env.get(name)
    if not text:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise LaunchError(name, f"is {text!r}, expected a number from 1 on; unset it")
    return int(text)

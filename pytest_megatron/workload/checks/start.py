"""One start of a training as the checks see it: its arguments, its ranks, its GPUs. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pytest_megatron.recipe.arguments import ModelArgs
from pytest_megatron.recipe.case import CaseMode, Evaluation, WorkloadCase
from pytest_megatron.recipe.model import Workload

# What a script has in it that runs the case with Megatron-LM's own driver.
_DRIVER = "TRAINING_PARAMS_PATH"
_OWN_RANKS = "GPUS_PER_NODE"
# Arguments that come from elsewhere, so that those of the case say little.
_FROM_ELSEWHERE = ("--use-checkpoint-args", "--yaml-cfg", "--heterogeneous-layers-config-path")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedStart:
    """One start.

    Attributes:
        file: The case.
        ranks_per_node: `nodes` times that many train together.
        env: What the case sets for this start.
        env_lines: Where the case says so.
        scripts: Shell text that runs before the training, and can change its environment.
    """

    file: Path
    arguments: ModelArgs
    nodes: int
    ranks_per_node: int
    platform: str
    mode: CaseMode
    env: Mapping[str, str]
    env_lines: Mapping[str, int] = field(default_factory=dict)
    scripts: str = ""

    @property
    def ranks(self) -> int:
        """Over all nodes."""
        return self.nodes * self.ranks_per_node

    @property
    def has_own_shape(self) -> bool:
        """Whether the arguments say what the model is like, and no checkpoint or other file."""
        return not self.arguments.has_any(*_FROM_ELSEWHERE)

    def at(self, *names: str) -> str:
        """Return where one of some arguments stands, else the case."""
        line = self.arguments.line(*names)
        return str(self.file) if line is None else f"{self.file}:{line}"

    def at_variable(self, name: str) -> str:
        """Return where a variable is set: the case, or the environment of the user."""
        if name not in self.env:
            return "the environment"
        line = self.env_lines.get(name)
        return f"{self.file}: ENV_VARS" if line is None else f"{self.file}:{line}"


def starts_of(workload: Workload, case: WorkloadCase) -> Iterator[CheckedStart]:
    """Yield what a row starts; nothing of a case that is expected to fail."""
    if case.evaluation is Evaluation.XPASS:
        return
    script = workload.script
    if script is not None and (_DRIVER not in script or _OWN_RANKS in script):
        return  # it starts something else, or on other ranks
    for variant in case.variants:
        if variant.arguments:
            yield CheckedStart(
                file=case.path,
                arguments=ModelArgs(variant.arguments),
                nodes=workload.nodes,
                ranks_per_node=variant.num_ranks or workload.gpus,
                platform=workload.platform,
                mode=case.mode,
                env={**case.env, **variant.env},
                env_lines=case.env_lines,
                scripts=f"{script or ''}\n{case.before_script or ''}",
            )

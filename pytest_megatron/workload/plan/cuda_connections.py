"""The rule for CUDA_DEVICE_MAX_CONNECTIONS: which value hardware and parallelism need. Pure.

With one connection kernels start in the order in which they were launched, which lets a collective
of tensor or context parallelism start before the kernel that it overlaps with. Blackwell does that
by itself; FSDP and the overlap of expert parallelism need several streams side by side instead.

Source: Megatron-LM megatron/training/arguments.py, validate_args().
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from pytest_megatron.gpu.host import gpu_model_of
from pytest_megatron.recipe.arguments import ModelArgs

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
MOST_CONNECTIONS = 32
FIRST_WITHOUT_RULE = 10  # Blackwell
TP, CP = "--tensor-model-parallel-size", "--context-parallel-size"
FSDP = ("--use-megatron-fsdp", "--use-custom-fsdp", "--use-torch-fsdp2")
EXPERT_OVERLAP = "--overlap-moe-expert-parallel-comm"


class Connections(Enum):
    """What a training needs of the variable."""

    ANY = "any"  # Megatron does not ask for it
    ONE = "one"  # Megatron refuses to start with anything else
    NOT_ONE = "not-one"  # Megatron refuses to start with 1
    MANY = "many"  # 1 works, and takes the overlap away
    EITHER = "either"  # 1 for one overlap or 32 for the other; the user has to say


def connections_of(arguments: ModelArgs, platform: str) -> Connections:
    """Return what a training on a platform needs; ANY where the GPUs are not known."""
    if arguments.is_on(*FSDP):
        return Connections.NOT_ONE
    model = gpu_model_of(platform)
    if model is None or model.architecture >= FIRST_WITHOUT_RULE:
        return Connections.ANY
    is_split = any((arguments.size(name) or 1) > 1 for name in (TP, CP))
    if arguments.is_on(EXPERT_OVERLAP):
        return Connections.EITHER if is_split else Connections.MANY
    return Connections.ONE if is_split else Connections.ANY


def planned_connections(
    arguments: ModelArgs, platform: str, env: Mapping[str, str]
) -> dict[str, str]:
    """Return the variable as a plan sets it where neither the user nor the case has.

    Args:
        arguments: Of the start.
        platform: Of the row.
        env: What the user has set.
    """
    values = {Connections.ONE: "1", Connections.MANY: str(MOST_CONNECTIONS)}
    value = values.get(connections_of(arguments, platform))
    return {} if value is None or VARIABLE in env else {VARIABLE: value}

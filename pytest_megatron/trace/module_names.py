"""Global names of modules and parameters: the same in every parallel layout.

Wrappers are left out, layers are numbered over all pipeline stages and model chunks, experts over
all expert-parallel ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch

_EXPERT_PARAMETER = re.compile(r"(weight|bias)(\d+)").fullmatch
_WRAPPED = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def unwrap(module: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside its wrappers for gradients, mixed precision or compilation."""
    while True:
        children = dict(module.named_children())
        if len(children) != 1 or next(iter(children)) not in _WRAPPED:
            return module
        module = next(iter(children.values()))


def named_modules(
    model: torch.nn.Module, prefix: str
) -> Iterator[tuple[str, torch.nn.Module, int]]:
    """Yield each module of a model without wrappers, its global name, its first expert's number.

    That number is 0 outside a mixture of experts.
    """
    yield from _walk(prefix, unwrap(model), 0, set())


def parameter_name(name: str, first_expert: int) -> str:
    """Return the global name of a parameter in its module.

    A module for several experts has `weight0`, `weight1` and so on.
    """
    found = _EXPERT_PARAMETER(name)
    return f"{found[1]}{int(found[2]) + first_expert}" if found and first_expert else name


def _walk(
    name: str, module: torch.nn.Module, first_expert: int, seen: set[int]
) -> Iterator[tuple[str, torch.nn.Module, int]]:
    if id(module) in seen:
        return
    seen.add(id(module))
    yield name, module, first_expert
    experts = getattr(module, "local_expert_indices", None)  # of a megatron-core MoELayer
    if isinstance(experts, list) and experts:
        first_expert = experts[0]
    for child_name, wrapped in module.named_children():
        child, part = unwrap(wrapped), child_name
        if part.isdecimal():
            layer = getattr(child, "layer_number", None)
            if isinstance(layer, int):
                part = str(layer - 1)
            elif name.endswith(".local_experts"):
                part = str(int(part) + first_expert)
        yield from _walk(f"{name}.{part}" if name else part, child, first_expert, seen)

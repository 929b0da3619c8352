"""Local tensors of a model and their places in a checkpoint, where each is once and whole.

megatron-core's `sharded_state_dict` knows the places; a factory in it means that one local tensor
is several there, as the two halves of a gated MLP are. Tensors of a plain torch model have their
own names; those of FSDP2 are `DTensor`s and know their places themselves.

Names of modules are global, the same in every parallel layout: wrappers are left out, layers are
numbered over all pipeline stages and model chunks, experts over all expert-parallel ranks.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard, cast

import torch

from pytest_megatron.trace.files import ParameterShard

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
    from torch.distributed.tensor import DTensor

_EXPERT_PARAMETER = re.compile(r"(weight|bias)(\d+)").fullmatch
_WRAPPED = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_ATTRIBUTES = (
    "tensor_model_parallel",
    "partition_dim",
    "partition_stride",
    "sequence_parallel",
    "allreduce",
    "shared_embedding",
)


@dataclass(frozen=True, slots=True)
class TensorShard:
    """A part of a tensor of a checkpoint.

    Attributes:
        tensor: The values; may share them with the local tensor or not.
        is_main: No other rank has to write it.
        is_padded: The first axis of the whole tensor may be longer in another layout.
    """

    key: str
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    tensor: torch.Tensor
    is_main: bool = True
    is_padded: bool = False


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """A tensor of the model and what it is in a checkpoint.

    Attributes:
        cut: Cuts a tensor of this shape into its shards.
        merge: Makes a tensor of this shape of its shards' values.
    """

    values: torch.Tensor
    cut: Callable[[torch.Tensor], list[TensorShard]]
    merge: Callable[[list[torch.Tensor]], torch.Tensor]


@dataclass(frozen=True, slots=True)
class NamedParameter:
    """A parameter with its global name.

    Attributes:
        owner: The module, and its name there; None of a parameter. A buffer may be replaced.
    """

    module: str
    kind: str
    name: str
    parameter: torch.Tensor
    attributes: Mapping[str, bool | int]
    local: LocalTensor
    owner: tuple[torch.nn.Module, str] | None = None

    @property
    def values(self) -> torch.Tensor:
        """The values that this rank holds now."""
        if self.owner is None:
            return self.parameter
        module, name = self.owner
        return cast("torch.Tensor", getattr(module, name))

    def parts(
        self, tensor: torch.Tensor, flat: tuple[int, int] | None
    ) -> Iterator[tuple[ParameterShard, tuple[int, ...], torch.Tensor]]:
        """Yield the parts of a tensor of this shape: place, shape, values.

        Args:
            tensor: The parameter or its gradient.
            flat: Elements of it that are valid, from and to; None for all.
        """
        shards = self.local.cut(local_values(tensor))
        if flat is None or flat == (0, tensor.numel()):
            for shard in shards:
                yield self._place(shard, None), tuple(shard.tensor.shape), shard.tensor
            return
        flattened = tensor.reshape(-1)
        places = torch.arange(tensor.numel()).view(tensor.shape)
        for shard in self.local.cut(places):
            held = shard.tensor.reshape(-1)
            if not len(held):
                continue
            first, after = int(held[0]), int(held[-1]) + 1
            if after - first != len(held):
                continue  # not one range of the parameter: cut along another axis than the first
            start, stop = max(flat[0], first), min(flat[1], after)
            if start < stop:
                place = self._place(shard, (start - first, stop - first))
                yield place, tuple(shard.tensor.shape), flattened[start:stop]

    def _place(self, shard: TensorShard, flat: tuple[int, int] | None) -> ParameterShard:
        """Return the place of a shard in the whole."""
        return ParameterShard(
            key=shard.key,
            global_shape=shard.global_shape,
            global_offset=shard.global_offset,
            flat=flat,
            attributes=self.attributes,
        )


def named_parameters(model: torch.nn.Module, prefix: str) -> list[NamedParameter]:
    """Return the parameters of a model in order, each once."""
    places = {_address(one.values): one for one in local_tensors(model, prefix)}
    found: dict[int, NamedParameter] = {}
    for module_name, module, first_expert in named_modules(model, prefix):
        for local_name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in found:
                continue
            numbered = _EXPERT_PARAMETER(local_name)  # a module for several has weight0, weight1
            name = f"{numbered[1]}{int(numbered[2]) + first_expert}" if numbered else local_name
            found[id(parameter)] = NamedParameter(
                module=module_name,
                kind=type(module).__name__,
                name=name,
                parameter=parameter,
                attributes={
                    attribute: value
                    for attribute in _ATTRIBUTES
                    if isinstance(value := getattr(parameter, attribute, None), int)
                },
                local=places.get(_address(parameter))
                or _plain(f"{module_name}.{name}".lstrip("."), parameter),
            )
    return list(found.values())


def named_buffers(model: torch.nn.Module, prefix: str) -> list[NamedParameter]:
    """Return the buffers of a model that a checkpoint holds, in order."""
    places = {_address(one.values): one for one in local_tensors(model, prefix)}
    return [
        NamedParameter(
            module=module_name,
            kind=type(module).__name__,
            name=name,
            parameter=buffer,
            attributes={"buffer": True},
            local=local,
            owner=(module, name),
        )
        for module_name, module, _ in named_modules(model, prefix)
        for name, buffer in module.named_buffers(recurse=False)
        if buffer.numel() and (local := places.get(_address(buffer))) is not None
    ]


def local_tensors(model: torch.nn.Module, prefix: str) -> list[LocalTensor]:
    """Return what a checkpoint would hold of this model: parameters and persistent buffers."""
    inner = unwrap(model)
    sharded_state_dict = getattr(inner, "sharded_state_dict", None)
    if sharded_state_dict is not None:
        return list(_tensors_in(sharded_state_dict(prefix=prefix and f"{prefix}.")))
    return [
        _plain(f"{prefix}.{name}" if prefix else name, value)
        for name, value in inner.state_dict(keep_vars=True).items()
        if isinstance(value, torch.Tensor)
    ]


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Return True for a `DTensor`; a program without them does not load them, which takes 1 s."""
    loaded = sys.modules.get("torch.distributed.tensor")
    return isinstance(value, getattr(loaded, "DTensor", ()))


def local_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values that this rank holds, without gradients."""
    tensor = tensor.detach()
    if is_dtensor(tensor):
        tensor = tensor.to_local()
    # A functional collective returns a tensor that is not there yet.
    wait: Callable[[], torch.Tensor] | None = getattr(tensor, "trigger_wait", None)
    return tensor if wait is None else wait()


def is_partial(tensor: torch.Tensor) -> bool:
    """Return True for a tensor of which each rank has a part of the sum."""
    return is_dtensor(tensor) and any(one.is_partial() for one in tensor.placements)


def reduced(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return a gradient placed as its parameter is; the optimizer's operations reduce it so too."""
    if is_dtensor(gradient) and is_dtensor(parameter):
        detached = cast("DTensor", gradient.detach())
        placed: torch.Tensor = detached.redistribute(placements=parameter.placements)
        return placed
    return gradient


def _tensors_in(entry: object) -> Iterator[LocalTensor]:
    """Walk over a sharded state dict."""
    from megatron.core.dist_checkpointing import mapping

    if isinstance(entry, Mapping):
        for value in entry.values():
            yield from _tensors_in(value)
    elif isinstance(entry, list | tuple):
        for value in entry:
            yield from _tensors_in(value)
    elif isinstance(entry, mapping.ShardedTensor):
        yield LocalTensor(
            entry.data, lambda values: [_shard(entry, values)], lambda parts: parts[0]
        )
    elif isinstance(entry, mapping.ShardedTensorFactory):
        yield _tensor_of_factory(entry)


def _plain(name: str, tensor: torch.Tensor) -> LocalTensor:
    """Return a tensor that is whole on this rank, or a part by its DTensor."""
    shape, offset = tuple(tensor.shape), (0,) * tensor.dim()
    is_main = torch.distributed.get_rank() == 0 if torch.distributed.is_initialized() else True
    if is_dtensor(tensor):
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        _, offset = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
        is_main = True
    return LocalTensor(
        tensor,
        lambda values: [TensorShard(name, shape, tuple(offset), values, is_main)],
        lambda parts: parts[0],
    )


def _tensor_of_factory(factory: ShardedTensorFactory) -> LocalTensor:
    """Return the parameter that a checkpoint holds as several tensors."""
    from megatron.core.dist_checkpointing import dict_utils

    def build(values: torch.Tensor) -> object:
        return factory.build_fn(factory.key, values, factory.replica_id, factory.flattened_range)

    def merge(parts: list[torch.Tensor]) -> torch.Tensor:
        """Join the tensors of a checkpoint to the one of the model."""
        left = iter(parts)
        merged: torch.Tensor = factory.merge_fn(
            dict_utils.dict_list_map_outplace(lambda _: next(left), build(factory.data))
        )
        return merged

    return LocalTensor(
        factory.data,
        lambda values: [_shard(one, one.data) for one in dict_utils.nested_values(build(values))],
        merge,
    )


def _shard(entry: ShardedTensor, values: torch.Tensor) -> TensorShard:
    """Return a part of a tensor from megatron-core's description."""
    replicas = entry.replica_id if isinstance(entry.replica_id, tuple) else (entry.replica_id,)
    return TensorShard(
        key=entry.key,
        global_shape=tuple(entry.global_shape),
        global_offset=tuple(entry.global_offset),
        tensor=values,
        is_main=all(index == 0 for index in replicas),
        is_padded=entry.allow_shape_mismatch,
    )


def _address(tensor: torch.Tensor) -> tuple[int, int]:
    values = local_values(tensor)
    return values.data_ptr(), values.numel()


def unwrap(module: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside its wrappers for gradients, mixed precision or compilation."""
    while True:
        children = dict(module.named_children())
        if len(children) != 1 or next(iter(children)) not in _WRAPPED:
            return module
        module = next(iter(children.values()))


def named_modules(
    model: torch.nn.Module, name: str, first_expert: int = 0, seen: set[int] | None = None
) -> Iterator[tuple[str, torch.nn.Module, int]]:
    """Yield each module of a model without wrappers, its global name, its first expert's number.

    That number is 0 outside a mixture of experts; `seen` has the modules that were yielded.
    """
    module = unwrap(model)
    seen = set() if seen is None else seen
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
        yield from named_modules(wrapped, f"{name}.{part}" if name else part, first_expert, seen)

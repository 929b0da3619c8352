"""Memory of one rank: every storage that an operation makes, until it is freed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from pytest_megatron.layouts.model import LargeTensor
from pytest_megatron.runs.record import RankMemory

_NUM_LARGEST = 10
_READS = (
    torch.ops.aten._local_scalar_dense.default,  # `item`, and tests of a tensor
    torch.ops.aten.equal.default,
    torch.ops.aten.nonzero.default,
)
_SMALL = 500  # a storage below this part of the peak needs no line of code


class MemoryTracker(TorchDispatchMode):
    """Follows storages from the operation that makes them to the moment that frees them.

    What an operation allocates and frees by itself is not seen, and neither is what an allocator
    keeps, so that a real peak is a little higher.
    """

    def __init__(self, place: Callable[[], str], read: Callable[[], None]) -> None:
        """Begin to track the memory of tensors.

        Args:
            place: Returns the line of the program that runs.
            read: Is called when the program reads a value.
        """
        super().__init__()
        self._read = read
        self._place = place
        self._live: dict[int, int] = {}  # storage -> number
        self._made: list[LargeTensor] = []
        self._events: list[int] = []  # number of a storage that was made, or freed: ~number
        self._now = self._peak = 0
        self._peak_at = 0
        self._held = (0, 0, 0)
        self._has_cuda = torch.cuda.is_available()

    @override
    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run an operation and note what it made."""
        if any(kind.__module__.startswith("torch.distributed.tensor") for kind in types):
            return NotImplemented  # its parts come by themselves
        if func in _READS:
            self._read()
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._note(leaf)
        return result

    def _note(self, tensor: torch.Tensor) -> None:
        """Note the memory that a new tensor takes, until it is freed."""
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # a subclass without one
            return
        key, size = storage._cdata, storage.nbytes()
        if key in self._live or not size or (self._has_cuda and tensor.device.type == "cpu"):
            return
        number = len(self._made)
        line = self._place() if size * _SMALL >= self._peak else ""
        dtype = str(tensor.dtype).removeprefix("torch.")
        self._made.append(LargeTensor(size, dtype, list(tensor.shape), line))
        self._live[key] = number
        self._events.append(number)
        weakref.finalize(storage, self._freed, key, number).atexit = False
        self._now += size
        if self._now > self._peak:
            self._peak, self._peak_at = self._now, len(self._events)

    def _freed(self, key: int, number: int) -> None:
        """Note that the memory of a tensor was freed."""
        if self._live.get(key) == number:
            del self._live[key]
        self._events.append(~number)
        self._now -= self._made[number].num_bytes

    def look(self) -> None:
        """Measure what models and optimizers hold now."""
        self._held = _held()

    def result(self) -> tuple[RankMemory, list[LargeTensor]]:
        """Return the peak with what of it models and optimizers hold, and its largest tensors."""
        if not any(self._held):
            self.look()
        parameters, gradients, states = self._held
        at_peak: dict[int, None] = {}
        for number in self._events[: self._peak_at]:
            if number >= 0:
                at_peak[number] = None
            else:
                at_peak.pop(~number, None)
        largest = sorted((self._made[n] for n in at_peak), key=lambda t: -t.num_bytes)
        peak = torch.cuda.max_memory_allocated() if self._has_cuda else self._peak
        held = parameters + gradients + states
        memory = RankMemory(
            peak=peak,
            parameters=parameters,
            gradients=gradients,
            optimizer=states,
            activations=max(peak - held, 0),
        )
        return memory, largest[:_NUM_LARGEST]


def _held() -> tuple[int, int, int]:
    """Return the bytes of parameters, of gradients, and of the states of optimizers."""
    weights: list[torch.Tensor] = []
    states: list[torch.Tensor] = []
    holds: dict[type, bool] = {}
    for found in gc.get_objects():
        kind = type(found)
        if kind not in holds:
            holds[kind] = issubclass(kind, torch.nn.Module | torch.optim.Optimizer)
        if not holds[kind]:
            continue
        if issubclass(kind, torch.nn.Module):
            weights += [p for p in vars(found).get("_parameters", {}).values() if p is not None]
        else:
            states += _tensors(found.state)
            states += [p for group in found.param_groups for p in group["params"]]
    gradients = [
        gradient
        for weight in weights
        for gradient in (weight.grad, getattr(weight, "main_grad", None))
        if isinstance(gradient, torch.Tensor)
    ]
    seen: set[int] = set()
    return _bytes(weights, seen), _bytes(gradients, seen), _bytes(states, seen)


def _tensors(states: Mapping[object, Mapping[object, object]]) -> Iterator[torch.Tensor]:
    for state in list(states.values()):
        yield from (t for t in tree_leaves(dict(state)) if isinstance(t, torch.Tensor))


def _bytes(tensors: Sequence[torch.Tensor], seen: set[int]) -> int:
    """Return the bytes of storages that were not seen before."""
    total = 0
    for tensor in tensors:
        local = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
        storage = local.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            total += storage.nbytes()
    return total

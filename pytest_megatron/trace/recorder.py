"""Record what a training computes, with hooks of torch, without changing it.

A model is a module that is called while no other runs; its modules get hooks at its first call.
Gradients are recorded by hooks on the tensors that modules get and return, in the order in which
the backward pass computes them; a hook on a tensor does not change the graph, and the tensor's
gradient is the sum over all its uses. Gradients of parameters are recorded as the optimizer gets
them, parameters after its step.

A forward pass inside the backward pass recomputes activations: it is not recorded again, and only
its tensors have gradients then. Draws no random numbers, keeps no graph and no tensor.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, cast

import numpy as np
import torch

from pytest_megatron.trace.equivalence import Phase
from pytest_megatron.trace.files import (
    ParameterShard,
    TensorMeasurement,
    TraceEnd,
    TraceRecord,
    TraceWriter,
)
from pytest_megatron.trace.measure import Array, bits_on_cpu, hash_on_cpu, measure_on_cpu
from pytest_megatron.trace.settings import TraceSettings
from pytest_megatron.trace.shards import (
    NamedParameter,
    is_dtensor,
    is_partial,
    local_tensors,
    local_values,
    named_buffers,
    named_modules,
    named_parameters,
    reduced,
    unwrap,
)
from pytest_megatron.trace.weights import header_of, read_weights, write_weights


class Noise:
    """Multiplies tensors by 1 plus noise."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def disturb_parameters(self, model: torch.nn.Module, prefix: str) -> None:
        """Disturb all floating tensors that a checkpoint of the model holds."""
        for local in local_tensors(model, prefix):
            values = local_values(local.values)
            if values.is_floating_point():
                parts = local.cut(values)
                disturbed = [
                    part.tensor * self._factors(f"{part.key}/{part.global_offset}", part.tensor)
                    for part in parts
                ]
                values.copy_(local.merge(disturbed))

    def disturb(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Return a tensor disturbed, in its type; the gradient is disturbed alike."""
        if is_dtensor(tensor):
            local = self.disturb(tensor.to_local(), name)
            return type(tensor).from_local(
                local, tensor.device_mesh, tensor.placements, run_check=False,
                shape=tensor.shape, stride=tensor.stride(),
            )  # fmt: skip
        return (tensor * self._factors(name, tensor)).to(tensor.dtype)

    def _factors(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return random factors around 1 for a tensor, the same for its name."""
        digest = hashlib.sha256(f"{self._seed}/{name}".encode()).digest()
        generator = torch.Generator(tensor.device)
        generator.manual_seed(int.from_bytes(digest[:7], "big"))
        # Computed at least in single precision: a narrow type has nothing between 1 and 1 + eps.
        dtype = torch.promote_types(tensor.dtype, torch.float32)
        draws = torch.rand(tensor.shape, generator=generator, device=tensor.device, dtype=dtype)
        return 1 + torch.finfo(tensor.dtype).eps * (draws - 0.5)


_WITHOUT_EFFECT = ("Identity", "IdentityOp", "IdentityFuncOp")  # return what they get
_PLAIN = torch._C.DisableTorchFunction  # no torch function mode of the program, no subclass
_Measured = tuple[TensorMeasurement, tuple[int, int] | None]  # and offset, bytes of stored values
_RANGES = "_get_model_param_range_map"  # of megatron-core's distributed optimizer
_MAX_CALLS = 1 << 12  # of a model without a step: the optimizer is of a kind that is not known


class _OptimizerStep(Protocol):
    """The `step` of an optimizer's class."""

    def __call__(self, optimizer: object, *args: object, **kwargs: object) -> object:
        """Update the parameters."""


@dataclass(frozen=True, slots=True)
class _Place:
    """A tensor of a module, for its records."""

    module: str
    kind: str
    tensor: str


@dataclass(frozen=True, slots=True)
class _Watched:
    """A tensor whose gradient will be recorded under each of these places."""

    tensor: weakref.ref[torch.Tensor]
    version: int
    places: list[_Place]


@dataclass(slots=True)
class _Model:
    """A module that is called while no other runs, without its wrappers.

    Attributes:
        name: "" is the model; other modules have their class's name.
        num_calls: In this step.
    """

    name: str
    module: torch.nn.Module
    parameters: list[NamedParameter]
    buffers: list[NamedParameter]
    num_calls: int = 0


class Recorder:
    """Records the first steps of the training in this process."""

    def __init__(self, settings: TraceSettings) -> None:
        self._settings = settings
        self._noise = None if settings.noise_seed is None else Noise(settings.noise_seed)
        self._writer: TraceWriter | None = None
        self._is_over = False
        self._undo = contextlib.ExitStack()
        self._models: list[_Model] = []
        self._known: set[int] = set()  # modules that have hooks
        self._watched: dict[int, _Watched] = {}
        self._measured: dict[tuple[str, torch.dtype, int], _Measured] = {}
        self._order = 0
        self._step = 1
        self._num_steps = 0  # that are whole
        self._microbatch: int | None = None  # of the model that runs
        self._backward_microbatch = 0
        self._num_optimizers_inside = 0  # of one another's step
        self._updated: set[int] = set()  # parameters, in this step
        self._reloaded: set[int] = set()  # optimizers that know the replaced weights

    def start(self) -> None:
        """Wait for the first call of a model and for optimizers."""
        from torch.nn.modules.module import register_module_forward_pre_hook
        from torch.optim.optimizer import (
            register_optimizer_step_post_hook,
            register_optimizer_step_pre_hook,
        )

        def before(optimizer: torch.optim.Optimizer, *_: object) -> None:
            self.before_optimizer(optimizer)

        def after(optimizer: torch.optim.Optimizer, *_: object) -> None:
            self.after_optimizer(optimizer, None)

        for hook in (
            register_module_forward_pre_hook(self._before_any_module),
            register_optimizer_step_pre_hook(before),
            register_optimizer_step_post_hook(after),
        ):
            self._undo.callback(hook.remove)

    def stop(self, *, is_whole: bool = True) -> None:
        """Take all hooks away and close the files; called again it does nothing.

        Args:
            is_whole: The program ended by itself; else the trace stays without its end.
        """
        if self._is_over:
            return
        self._is_over = True
        self._undo.close()
        if self._writer is None:
            if not is_whole:
                return
            self._writer = self._open(None, torch.device("cpu"))
        if self._updated:
            self._num_steps = self._step
        end = TraceEnd(steps=self._num_steps, problem=self._problem())
        self._writer.close(end if is_whole else None)
        self._watched.clear()
        self._measured.clear()

    def _problem(self) -> str | None:
        """Return why the trace cannot be compared, None if it can."""
        if not self._models:
            return "the program called no torch.nn.Module with gradients"
        if not self._num_steps:
            return "no optimizer of torch or megatron-core made a step"
        return None

    def _open(self, model: torch.nn.Module | None, device: torch.device) -> TraceWriter:
        """Open the files of this rank's trace, and write the header."""
        values = self._settings.values
        header = header_of(model, device, values)
        writer = TraceWriter(self._settings.directory, header.rank, has_values=values == "full")
        writer.write_header(header)
        return writer

    def _end_step(self) -> None:
        """Write the records of a step."""
        assert self._writer is not None
        self._writer.flush()
        self._num_steps = self._step
        self._watched.clear()
        self._measured.clear()
        self._updated.clear()
        for model in self._models:
            model.num_calls = 0
        self._step += 1
        if self._step > self._settings.steps:
            self.stop()

    # Modules

    def _before_any_module(self, module: torch.nn.Module, args: tuple[object, ...]) -> None:
        """Record a model from its first call on."""
        if (
            id(module) in self._known
            or self._microbatch is not None
            or torch.compiler.is_compiling()
            or not torch.is_grad_enabled()
            or _is_in_backward()
        ):
            return
        model = self._adopt(module)
        if model.module is module:  # its own hook comes too late for this call
            self._before_module(model, model.name, module, args, {})

    def _adopt(self, module: torch.nn.Module) -> _Model:
        """Give the modules of a model their hooks, and the model its initial weights."""
        inner = unwrap(module)
        name = self._name_of(inner)
        if self._writer is None:
            parameter = next(inner.parameters(), None)
            device = torch.device("cpu") if parameter is None else parameter.device
            self._writer = self._open(inner, device)
            self._wrap_megatron_optimizers()
        with torch.no_grad(), _PLAIN():
            if self._settings.weights_from is not None:
                self._record_initial(inner, name)
                read_weights(inner, name, self._settings.weights_from)
            if self._settings.weights_to is not None:
                write_weights(inner, name, self._settings.weights_to, len(self._models))
            if self._noise is not None:
                self._noise.disturb_parameters(inner, name)
        model = _Model(name, inner, named_parameters(inner, name), named_buffers(inner, name))
        self._known.update(id(one) for one in module.modules())
        self._models.append(model)
        for module_name, one, _ in named_modules(inner, name):
            if type(one).__name__ in _WITHOUT_EFFECT:
                continue
            before = partial(self._before_module, model, module_name)
            after = partial(self._after_module, module_name)
            for hook in (
                one.register_forward_pre_hook(before, with_kwargs=True),
                one.register_forward_hook(after, with_kwargs=True),
            ):
                self._undo.callback(hook.remove)
        leave = inner.register_forward_hook(self._leave, always_call=True)
        self._undo.callback(leave.remove)
        with _PLAIN():
            for named in (*model.parameters, *model.buffers):
                self._record_parameter("update", named, named.values, None, step=0)
        return model

    def _record_initial(self, model: torch.nn.Module, name: str) -> None:
        """Record what the program made itself, which another run's weights replace."""
        for named in (*named_parameters(model, name), *named_buffers(model, name)):
            self._record_parameter("initial", named, named.values, None, step=0)

    def _name_of(self, model: torch.nn.Module) -> str:
        """Return "" for the model and its chunks; a loss or a second model has its class's name."""
        names = [one.name for one in self._models]
        is_chunk = hasattr(model, "pre_process")  # of a pipeline stage of megatron-core
        is_first = "" not in names and next(model.parameters(), None) is not None
        if is_chunk or is_first:
            return ""
        kind = type(model).__name__
        number = sum(name.rstrip("0123456789") == kind for name in names)
        return f"{kind}{number + 1}" if number else kind

    def _leave(self, *_: object) -> None:
        if not _is_in_backward():
            self._microbatch = None

    def _before_module(
        self,
        model: _Model,
        name: str,
        module: torch.nn.Module,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> None:
        """Record the inputs of a module."""
        is_model = module is model.module
        if is_model and torch.is_grad_enabled() and not _is_in_backward():
            if self._updated:
                self._end_step()
            self._microbatch = model.num_calls
            model.num_calls += 1
            if model.num_calls > _MAX_CALLS:
                self.stop()
        if self._is_idle():
            return
        is_part = getattr(module, "pre_process", True) is False
        with _PLAIN():
            for label, tensor in _tensors("input", [*args, kwargs]):
                is_float = tensor.is_floating_point()
                if (is_float and not is_part) or (is_model and not is_float):
                    self._see(_Place(name, type(module).__name__, label), tensor)

    def _is_idle(self) -> bool:
        """Return True if what a module computes now is not recorded."""
        return (
            self._is_over
            or torch.compiler.is_compiling()
            or (self._microbatch is None and not _is_in_backward())
        )

    def _after_module(
        self, name: str, module: torch.nn.Module, args: object, kwargs: object, output: object
    ) -> object:
        """Record the outputs of a module."""
        del args, kwargs
        if self._is_idle():
            return output
        if self._noise is not None and next(module.children(), None) is None:
            name_of_call = f"{name}/{self._step}/{self._current_microbatch()}"
            output = self._disturbed(self._noise, name_of_call, output)
        if getattr(module, "post_process", True) is not False:
            with _PLAIN():
                for label, tensor in _tensors("output", output):
                    self._see(_Place(name, type(module).__name__, label), tensor)
        return output

    def _disturbed(self, noise: Noise, name: str, output: object) -> object:
        """Disturb the tensors that a module computed; parameters that it returns stay."""
        if isinstance(output, torch.Tensor) and not isinstance(output, torch.nn.Parameter):
            return noise.disturb(output, name) if output.is_floating_point() else output
        if type(output) is tuple or type(output) is list:
            parts = [
                self._disturbed(noise, f"{name}.{index}", one) for index, one in enumerate(output)
            ]
            return type(output)(parts)
        return output

    def _current_microbatch(self) -> int:
        """Return the microbatch that is computed, or computed anew in the backward pass."""
        if self._microbatch is None or _is_in_backward():
            return self._backward_microbatch
        return self._microbatch

    def _see(self, place: _Place, tensor: torch.Tensor) -> None:
        """Record a tensor that a module gets or returns, and have its gradient recorded."""
        if is_partial(tensor):
            return
        microbatch = self._current_microbatch()
        if not _is_in_backward():
            self._record("forward", place, tensor, microbatch)
        # torch's tensor parallelism hands a module a `DTensor` of its own of what others use too,
        # so its gradient is not that of the whole tensor.
        is_own = is_dtensor(tensor) and place.tensor.startswith("input")
        if tensor.requires_grad and torch.is_grad_enabled() and not is_own:
            self._watch(place, tensor, microbatch)

    def _watch(self, place: _Place, tensor: torch.Tensor, microbatch: int) -> None:
        """Have the gradient of a tensor recorded when it is there."""
        place = _Place(place.module, place.kind, f"grad_{place.tensor}")
        known = self._watched.get(id(tensor))
        if known and known.tensor() is tensor and known.version == tensor._version:
            if place not in known.places:  # a recomputed module gets the same tensor again
                known.places.append(place)
            return
        places = [place]
        self._watched[id(tensor)] = _Watched(weakref.ref(tensor), tensor._version, places)
        tensor.register_hook(  # type: ignore[no-untyped-call] # torch's stub lacks it
            partial(self._on_gradient, places, microbatch)
        )

    def _on_gradient(
        self, places: Sequence[_Place], microbatch: int, gradient: torch.Tensor | None
    ) -> None:
        """Record the gradient of an activation."""
        if self._is_over:
            return
        self._backward_microbatch = microbatch
        if gradient is None or is_partial(gradient):  # none: nothing of the loss depends on it
            return
        with _PLAIN():
            values = local_values(gradient)
            measured = self._measure(values)
            for place in reversed(places):  # who got the tensor last computes its gradient first
                self._append("backward", place, values, measured, microbatch=microbatch)

    # Optimizers

    def _wrap_megatron_optimizers(self) -> None:
        """Have the steps of megatron-core's optimizers recorded."""
        found = sys.modules.get("megatron.core.optimizer.optimizer")
        if found is None:
            return
        for kind in _subclasses(found.MegatronOptimizer):
            step = vars(kind).get("step")
            if step is not None:
                type.__setattr__(kind, "step", self._traced(step))
                self._undo.callback(setattr, kind, "step", step)

    def _traced(self, step: _OptimizerStep) -> _OptimizerStep:
        """Return an optimizer's step that records parameters before and after."""

        @functools.wraps(step)
        def traced(optimizer: object, *args: object, **kwargs: object) -> object:
            """Make the step, and record parameters before and after."""
            result = None
            self.before_optimizer(optimizer)
            try:
                result = step(optimizer, *args, **kwargs)
            finally:
                self.after_optimizer(optimizer, result)
            return result

        return cast("_OptimizerStep", traced)

    def before_optimizer(self, optimizer: object) -> None:
        """Record the gradients that an optimizer gets; inside another's step nothing."""
        self._num_optimizers_inside += 1
        if self._num_optimizers_inside > 1 or self._is_over or not self._models:
            return
        reload = getattr(optimizer, "reload_model_params", None)
        if self._settings.has_new_weights and reload and id(optimizer) not in self._reloaded:
            self._reloaded.add(id(optimizer))
            reload()
        owned = _owned(optimizer)
        with _PLAIN():
            for one in self._parameters_of(optimizer):
                gradient = getattr(one.parameter, "main_grad", None)
                gradient = one.parameter.grad if gradient is None else gradient
                flat = owned.get(id(one.parameter))
                if gradient is not None and flat != (0, 0):
                    gradient = reduced(gradient, one.parameter)
                    self._record_parameter("gradient", one, gradient, flat)

    def after_optimizer(self, optimizer: object, result: object) -> None:
        """Record the parameters after an optimizer's step."""
        self._num_optimizers_inside -= 1
        if self._num_optimizers_inside or self._is_over or not self._models:
            return
        owned = _owned(optimizer) if _gathers_late(optimizer) else {}
        with _PLAIN():
            if isinstance(result, tuple) and len(result) > 1 and result[1] is not None:
                norm = torch.as_tensor(result[1], dtype=torch.float64)  # megatron-core's answer
                self._record("gradient", _Place("", type(optimizer).__name__, "grad_norm"), norm, 0)
            for one in self._parameters_of(optimizer):
                flat = owned.get(id(one.parameter))
                if flat != (0, 0):
                    self._record_parameter("update", one, one.parameter, flat)
                self._updated.add(id(one.parameter))
            for model in self._models:
                for one in model.buffers:
                    self._record_parameter("update", one, one.values, None)
        if all(
            id(one.parameter) in self._updated
            for model in self._models
            for one in model.parameters
            if one.parameter.requires_grad
        ):
            self._end_step()

    def _parameters_of(self, optimizer: object) -> list[NamedParameter]:
        """Return the parameters that an optimizer changes; all where it has copies of its own."""
        every = [one for model in self._models for one in model.parameters]
        if isinstance(optimizer, torch.optim.Optimizer):
            held = {id(one) for group in optimizer.param_groups for one in group["params"]}
            return [one for one in every if id(one.parameter) in held] or every
        return [one for one in every if one.parameter.requires_grad]

    # Records

    def _record_parameter(
        self,
        phase: Phase,
        one: NamedParameter,
        tensor: torch.Tensor,
        flat: tuple[int, int] | None,
        *,
        step: int | None = None,
    ) -> None:
        """Record a parameter or its gradient."""
        place = _Place(one.module, one.kind, one.name)
        for shard, shape, values in one.parts(tensor, flat):
            measured = self._measure(values)
            self._append(phase, place, values, measured, shard=shard, shape=shape, step=step)

    def _record(self, phase: Phase, place: _Place, tensor: torch.Tensor, microbatch: int) -> None:
        """Measure a tensor, and append its record."""
        values = local_values(tensor)
        self._append(phase, place, values, self._measure(values), microbatch=microbatch)

    def _measure(self, values: torch.Tensor) -> _Measured:
        """Measure what this rank holds of a tensor, and store it."""
        bits = bits_on_cpu(values)
        # Most tensors are recorded several times, as what one module returns and another gets.
        key = (hash_on_cpu(bits), values.dtype, len(bits))
        if key not in self._measured:
            measured = measure_on_cpu(bits, values.dtype, key[0])
            self._measured[key] = measured, self._store(bits)
        return self._measured[key]

    def _store(self, bits: Array) -> tuple[int, int] | None:
        """Write a tensor's values, and return where, if values are stored."""
        if self._settings.values != "full":
            return None
        assert self._writer is not None
        return self._writer.write_values(bits.view(np.uint8).data)

    def _append(  # noqa: PLR0913 - the fields of a record
        self,
        phase: Phase,
        place: _Place,
        tensor: torch.Tensor,
        measured: _Measured,
        *,
        microbatch: int = 0,
        shard: ParameterShard | None = None,
        shape: tuple[int, ...] | None = None,
        step: int | None = None,
    ) -> None:
        """Write the record of a tensor."""
        assert self._writer is not None
        record = TraceRecord(
            order=self._order,
            step=self._step if step is None else step,
            microbatch=microbatch,
            phase=phase,
            module=place.module,
            kind=place.kind,
            tensor=place.tensor,
            shape=tuple(tensor.shape) if shape is None else shape,
            dtype=str(tensor.dtype).removeprefix("torch."),
            at=measured[1],
            parameter=shard,
            **vars(measured[0]),
        )
        self._order += 1
        self._writer.write_record(record)


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _tensors(name: str, value: object) -> Iterable[tuple[str, torch.Tensor]]:
    """Return the activations in what a module gets or returns, with their names."""
    if isinstance(value, torch.Tensor):
        is_other = isinstance(value, torch.nn.Parameter) or value.layout is not torch.strided
        return () if is_other else ((name if "." in name else f"{name}.0", value),)
    if isinstance(value, list | tuple):
        # The keyword arguments are the last of a module's arguments.
        return [
            found
            for index, one in enumerate(value)
            if one is not None
            for found in _tensors(
                name if isinstance(one, dict) and "." not in name else f"{name}.{index}", one
            )
        ]
    if isinstance(value, Mapping):
        return [found for key, one in value.items() for found in _tensors(f"{name}.{key}", one)]
    return ()


def _subclasses(kind: type) -> Iterator[type]:
    """Yield a class and all below it."""
    yield kind
    below: list[type] = kind.__subclasses__()
    for one in below:
        yield from _subclasses(one)


def _parts(optimizer: object) -> list[object]:
    """Return a megatron-core optimizer, or those that it is made of."""
    chained = getattr(optimizer, "chained_optimizers", None)
    if chained is None:
        return [optimizer]
    return [part for one in chained for part in _parts(one)]


def _owned(optimizer: object) -> dict[int, tuple[int, int]]:
    """Return the part of each parameter that this rank updates under a distributed optimizer."""
    found: dict[int, tuple[int, int]] = {}
    for part in _parts(optimizer):
        for buffer in getattr(part, "buffers", ()):
            found.update({id(parameter): (0, 0) for parameter in buffer.params})
        for parameter in getattr(part, "model_param_gbuf_map", ()):
            held = getattr(part, _RANGES)(parameter)["param"]
            found[id(parameter)] = (held.start, held.end)
    return found


def _gathers_late(optimizer: object) -> bool:
    """Return True if ranks get each other's updated parameters in the next forward pass."""
    return any(
        getattr(getattr(part, "ddp_config", None), "overlap_param_gather", False)
        for part in _parts(optimizer)
    )

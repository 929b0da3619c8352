"""What one rank does, recorded: process groups, calls, micro-batches, memory."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import sys
import sysconfig
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from pytest_megatron.layouts.model import (
    Call,
    MadeGroup,
    RankRecord,
    Settings,
    write_record,
)
from pytest_megatron.runs.record import RankMemory

if TYPE_CHECKING:
    from torch.optim.optimizer import Optimizer


_READS = (
    torch.ops.aten._local_scalar_dense.default,  # `item`, and tests of a tensor
    torch.ops.aten.equal.default,
    torch.ops.aten.nonzero.default,
)


class MemoryTracker(TorchDispatchMode):
    """Follows storages from the operation that makes them to the moment that frees them.

    What an operation allocates and frees by itself is not seen, and neither is what an allocator
    keeps, so that a real peak is a little higher.
    """

    def __init__(self, read: Callable[[], None]) -> None:
        """Begin to track the memory of tensors.

        Args:
            read: Is called when the program reads a value.
        """
        super().__init__()
        self._read = read
        self._live: dict[int, int] = {}  # storage -> number
        self._num_made = 0
        self._now = self._peak = 0
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
        self._num_made += 1
        self._live[key] = self._num_made
        weakref.finalize(storage, self._freed, key, self._num_made, size).atexit = False
        self._now += size
        self._peak = max(self._peak, self._now)

    def _freed(self, key: int, number: int, size: int) -> None:
        """Note that the memory of a tensor was freed."""
        if self._live.get(key) == number:
            del self._live[key]
        self._now -= size

    def look(self) -> None:
        """Measure what models and optimizers hold now."""
        self._held = _held()

    def result(self) -> RankMemory:
        """Return the peak with what of it models and optimizers hold."""
        if not any(self._held):
            self.look()
        parameters, gradients, states = self._held
        peak = torch.cuda.max_memory_allocated() if self._has_cuda else self._peak
        held = parameters + gradients + states
        return RankMemory(
            peak=peak,
            parameters=parameters,
            gradients=gradients,
            optimizer=states,
            activations=max(peak - held, 0),
        )


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


_SKIPPED = (
    str(Path(torch.__file__).parent) + os.sep,
    str(Path(__file__).parent) + os.sep,
    "<frozen",
    "<string",
)


_NUM_FRAMES = 2
_WRAPPED = ("module", "_orig_mod", "_fsdp_wrapped_module")  # in DDP, a compiled module, FSDP
_LARGEST_MESSAGE = 1 << 16  # bytes; larger ones carry data, not sizes or objects
_LIBRARY = sysconfig.get_path("stdlib") + os.sep


@cache
def _is_skipped(name: str, function: str) -> bool:
    """Return true for a line of torch or of ours, or of a mode that stands between."""
    if function in ("__torch_function__", "__torch_dispatch__"):
        return True
    if name.endswith("typing_extensions.py"):  # its wrapper of what is deprecated
        return True
    is_installed = "site-packages" in name
    return name.startswith(_SKIPPED) or (name.startswith(_LIBRARY) and not is_installed)


class Mail:
    """Small messages of ranks that ran before, by who sent which of them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._counts: dict[str, int] = {}

    def _path(self, key: str, side: str = "") -> Path:
        """Return the file of the next value under a key."""
        number = self._counts[side + key] = self._counts.get(side + key, -1) + 1
        digest = hashlib.sha256(f"{key}/{number}".encode()).hexdigest()[:24]
        return self._directory / digest

    def post(self, keys: Sequence[str], tensor: torch.Tensor, side: str = "") -> None:
        """Keep a message; of equal keys the first sender's stays.

        Args:
            keys: By which it is fetched.
            tensor: The message.
            side: Tells what this rank sends from what it fetches, where these are counted apart.
        """
        for path in [self._path(key, side) for key in keys]:
            if not (tensor.is_floating_point() or path.exists()) and _is_small(tensor):
                torch.save(tensor.detach().cpu(), path)

    def fetch(self, keys: Sequence[str], tensor: torch.Tensor) -> bool:
        """Fill a tensor with the message; false if there is none that fits."""
        for path in [self._path(key) for key in keys]:
            if path.exists() and _is_small(tensor):
                found: torch.Tensor = torch.load(path)
                if found.numel() == tensor.numel():
                    tensor.copy_(found.view(tensor.shape))
                    return True
        return False


def _is_small(tensor: torch.Tensor) -> bool:
    return tensor.numel() * tensor.element_size() <= _LARGEST_MESSAGE


class RankRecorder:
    """Records what this rank does.

    Attributes:
        mail: Messages of ranks that ran before.
        batch: Number of the batch of point-to-point calls that is being issued.
        asked_backend: The backend of the default group as the program named it.
        is_eager: Whether it named a device of the default group.
        is_object: Whether a call is one part of sending an object.
        is_internal: Whether a call only serves torch itself; this and `is_object` hold for the line
            that `place` returned last.
        noise: Changes what others are taken to have sent; None changes nothing.
    """

    def __init__(self, settings: Settings, rank: int, *, is_other: bool) -> None:
        """Create the recorder; `is_other` is true in the second run, with other data received."""
        self._record = RankRecord(rank=rank, world_size=settings.world_size)
        self._steps, self._directory = settings.steps, settings.directory
        self._file = self._directory / f"rank_{rank}{'.other' if is_other else ''}.json"
        self._clock = 0
        self._counts: dict[str, int] = {}
        self.world_size = settings.world_size
        self._known: set[int] = set()  # modules of models
        self._has_run = False  # a model, since the last step
        self._begun = 0  # id() of the model that ran first after the last step
        self.memory = MemoryTracker(self._read)
        self.mail = Mail(settings.directory / "mail")
        self.batch: int | None = None
        self.asked_backend, self.is_eager = "", False
        self._program = ""
        self._last_read = ""
        self.noise = torch.Generator().manual_seed(1) if is_other else None
        self.is_object = self.is_internal = False

    def place(self) -> str:
        """Return the innermost line that is neither torch's nor ours, and who calls its file."""
        frame: FrameType | None = sys._getframe(1)
        self.is_object = self.is_internal = False
        found: list[FrameType] = []
        while frame is not None and len(found) < _NUM_FRAMES:
            name = frame.f_code.co_filename
            if not _is_skipped(name, frame.f_code.co_name):
                if not found or name != found[-1].f_code.co_filename:
                    found.append(frame)
            elif not found:
                name = frame.f_code.co_name
                self.is_object |= "object" in name  # `all_gather_object`, others
                self.is_internal |= "object" in name or "verify" in name  # as DDP does
            frame = frame.f_back
        lines = [
            f"{_short(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"
            for frame in found
        ]
        return ", from ".join(lines) or "the start of the program"

    def group(self, name: str, ranks: list[int], backend: str) -> None:
        """Note that the program makes a group."""
        self._program = str(getattr(sys.modules["__main__"], "__file__", ""))
        made = MadeGroup(name, ranks, backend, self.place(), after=len(self._record.calls))
        self._record.groups.append(made)

    def call(
        self,
        name: str,
        kind: str,
        tensors: Sequence[torch.Tensor],
        **more: Any,
    ) -> Callable[[], None]:
        """Note a call of a group by its name; returns what notes that the program waits for it."""
        index = self._counts[name] = self._counts.get(name, -1) + 1
        line = self.place()
        call = Call(
            group=name,
            index=index,
            kind=kind,
            dtype=str(tensors[0].dtype).removeprefix("torch.") if tensors else "",
            shapes=[list(tensor.shape) for tensor in tensors],
            step=self._record.steps + 1,
            line=line,
            read=self._last_read,
            has_own_size=not self.is_object,
            issued=self._tick(),
            batch=self.batch,
            num_bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors),
            **more,
        )
        self._record.calls.append(call)
        self._last_read = ""

        def waited() -> None:
            if call.waited is None:
                call.waited = self._tick()

        return waited

    def _read(self) -> None:
        if self._record.calls:
            self._last_read = self.place()

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def start(self) -> None:
        """Begin to count micro-batches and steps of this rank."""
        from torch.nn.modules.module import register_module_forward_pre_hook
        from torch.optim.optimizer import (
            register_optimizer_step_post_hook,
            register_optimizer_step_pre_hook,
        )

        register_module_forward_pre_hook(self._before_module)
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)

    def _before_module(self, module: torch.nn.Module, _: object) -> None:
        """Count a forward pass of a model."""
        if id(module) not in self._known:
            self._known.update(id(part) for part in module.modules())
            if next(module.parameters(), None) is None:
                return
            self._record.models.append(type(module).__name__)
            for container, numbers in _layers(module, ""):
                self._record.layers.setdefault(container, []).extend(numbers)
            self.memory.look()
            vars(module)["_layout_model"] = True
        if "_layout_model" not in vars(module) or not torch.is_grad_enabled():
            return
        is_first, self._has_run = not self._has_run, True
        if self._record.steps >= self._steps:
            if is_first:
                self._begun, self._record.num_judged = id(module), len(self._record.calls)
            elif self._begun == id(module):
                self._cut()
            return
        counts = self._record.forwards
        while len(counts) <= self._record.steps:
            counts.append(0)
        counts[-1] += 1

    def _before_step(self, _: Optimizer, *__: object) -> None:
        """End the rank before it steps once more."""
        if self._has_run and self._record.steps >= self._steps:
            self._cut()

    def _cut(self) -> None:
        """End the rank, which has made its calls between the last step and the next one."""
        self.finish(end="cut")
        sys.stdout.flush()
        os._exit(0)

    def _after_step(self, _: Optimizer, *__: object) -> None:
        """Count a step."""
        if self._has_run:
            self._has_run = False
            self._record.steps += 1
        if self._record.steps == self._steps:
            self.memory.look()  # the program clears gradients soon

    def finish(self, end: str, problem: str = "", line: str = "") -> None:
        """Write the record of this rank."""
        self._record.end, self._record.problem, self._record.problem_line = end, problem, line
        self._record.memory = self.memory.result()
        files = {name: getattr(m, "__file__", None) or "" for name, m in sys.modules.copy().items()}
        own = [file for name, file in files.items() if not name.startswith("pytest_megatron")]
        self._record.sources = [
            file
            for file in dict.fromkeys([self._program, *own])
            if file.endswith(".py") and not ("site-packages" in file or _is_skipped(file, ""))
        ]
        modules = self._directory / "modules.json"
        if not modules.exists():
            installed = [name for name, file in files.items() if "site-packages" in file]
            modules.write_text(json.dumps(installed))
        write_record(self._file, self._record)


def _layers(module: torch.nn.Module, name: str) -> Iterator[tuple[str, list[int]]]:
    """Yield the outermost containers of layers, with the numbers of these."""
    parts = dict(module.named_children())
    if parts and all(word.isdecimal() for word in parts):
        numbers = [getattr(part, "layer_number", None) for part in parts.values()]
        known = [number for number in numbers if isinstance(number, int)]
        yield (
            name or type(module).__name__,
            known if len(known) == len(parts) else list(map(int, parts)),
        )
        return
    for word, part in parts.items():
        is_wrapped = word in _WRAPPED
        yield from _layers(part, name if is_wrapped else f"{name}.{word}".lstrip("."))


@cache
def _short(path: str) -> str:
    """Return a path as a person knows it: below site-packages, or below the working directory."""
    installed = path.rpartition("site-packages" + os.sep)[2]
    return installed.removeprefix(f"{Path.cwd()}{os.sep}")


def line_of(frames: Sequence[traceback.FrameSummary]) -> str:
    """Return the innermost line of a traceback that is neither torch's nor ours."""
    for frame in reversed(frames):
        if not _is_skipped(frame.filename, frame.name):
            return f"{_short(frame.filename)}:{frame.lineno} in {frame.name}"
    return ""

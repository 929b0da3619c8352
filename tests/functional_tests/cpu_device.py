"""Answer megatron-core's questions about CUDA with the CPU, for as long as one context is open.

megatron-core has no CPU device of its own: it names `device="cuda"` literally, asks
`torch.cuda.current_device()` where to put a buffer, keeps dropout states in CUDA generators and
asserts that gradients are `torch.cuda.FloatTensor`. On a machine without a GPU, inside
`cpu_device()`, each of these gets the answer that leads to the same computation on the CPU; the
arithmetic itself is untouched. Leaving the context puts back every name that it replaced.

Must not be used where CUDA is: `cpu_device()` refuses that. Nothing here imports megatron-core
but for the two names that have to be replaced inside it. It holds for the thread that opened it,
which is the one that trains (autograd runs the backward pass of CPU tensors in the caller).
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, TypeGuard

import torch
from torch.overrides import TorchFunctionMode
from typing_extensions import override

CPU = torch.device("cpu")
IS_CUDA = vars(torch._C.TensorBase)["is_cuda"].__get__  # what reading the attribute calls


class TorchFunction(Protocol):
    """Any function of torch."""

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Do what it does."""
        ...


class AimAtCpu(TorchFunctionMode):
    """Re-aims every torch call that names a CUDA device.

    Only what a caller *says* is changed (`device="cuda"`, `.cuda()`, `.to("cuda")`), and two things
    that tensors say back: `Tensor.type()`, by whose text the optimizers sort their parameters, and
    `Tensor.is_cuda`, by which the all-to-all dispatcher knows what it has to bring to the host.
    """

    @override
    def __torch_function__(
        self,
        func: TorchFunction,
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Call `func` with the CPU in the place of CUDA."""
        if func is torch.Tensor.cuda:
            return args[0]
        if func == IS_CUDA:
            return True
        if func is torch.Tensor.to:
            args = tuple(CPU if _names_cuda(value) else value for value in args)
        named = {
            key: CPU if key == "device" and _names_cuda(value) else value
            for key, value in (kwargs or {}).items()
        }
        answer = func(*args, **named)
        if func is torch.Tensor.type and isinstance(answer, str):
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer


def _names_cuda(value: object) -> TypeGuard[str | torch.device]:
    """Whether `value` is a way to write a CUDA device."""
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and value.partition(":")[0] == "cuda"


def _nothing(*_: object, **__: object) -> None:
    """Stand for a call that has nothing to do on the CPU."""


class InertEvent:
    """Stands for a CUDA event: a time of the host's clock."""

    wait = synchronize = _nothing  # what comes before the event in the program has happened

    def __init__(self, *_: object, **__: object) -> None:
        self.time_s = 0.0

    def record(self, *_: object) -> None:
        """Note the time."""
        self.time_s = time.perf_counter()

    def query(self) -> bool:
        """Say that the event has happened."""
        return True

    def elapsed_time(self, end: InertEvent) -> float:
        """Milliseconds from this event to `end`."""
        return (end.time_s - self.time_s) * 1000


class InertStream:
    """Stands for a CUDA stream: work on the CPU is done in the order in which it is written."""

    wait_stream = wait_event = synchronize = _nothing

    def __init__(self, *_: object, **__: object) -> None: ...

    def record_event(self, event: InertEvent | None = None) -> InertEvent:
        """Note the time in `event` or a new one."""
        event = event or InertEvent()
        event.record()
        return event


def _get_rng_state(*_: object, **__: object) -> torch.Tensor:
    """Answer for `torch.cuda.get_rng_state`: the generator that dropout on the CPU draws from."""
    return torch.random.get_rng_state()


def _set_rng_state(state: torch.Tensor, *_: object, **__: object) -> None:
    """Answer for `torch.cuda.set_rng_state`, and for megatron-core's own copy of it."""
    torch.random.set_rng_state(state)


def _manual_seed(seed: int) -> None:
    """Answer for `torch.cuda.manual_seed`."""
    torch.default_generator.manual_seed(seed)


def _is_not_about_cpu_rng(record: logging.LogRecord) -> bool:
    """Drop the warning that a fork drew from the CPU's generator: here it has to."""
    return "CPU RNG state changed" not in record.msg


def _aimed_backward(run: TorchFunction) -> TorchFunction:
    """Open the mode for a backward pass, in which checkpointed layers compute forward again.

    torch closes it while it hands a call to it, and `torch.autograd.backward` is such a call.
    """

    def backward(*args: object, **kwargs: object) -> object:
        with AimAtCpu():
            return run(*args, **kwargs)

    return backward


def answers() -> list[tuple[object, str, object]]:
    """Every name that `cpu_device` replaces: its owner, its name, what stands there instead."""
    from megatron.core.tensor_parallel import random as megatron_random

    stream = InertStream()
    run_backward: TorchFunction = vars(torch.autograd)["_engine_run_backward"]
    return [
        (torch.cuda, "get_rng_state", _get_rng_state),
        (torch.cuda.random, "get_rng_state", _get_rng_state),
        (torch.cuda, "set_rng_state", _set_rng_state),
        (torch.cuda.random, "set_rng_state", _set_rng_state),
        (megatron_random, "_set_cuda_rng_state", _set_rng_state),
        (torch.cuda, "manual_seed", _manual_seed),
        (torch.cuda, "manual_seed_all", _manual_seed),
        (torch.cuda, "current_device", lambda: CPU),
        (torch.cuda, "Stream", InertStream),
        (torch.cuda, "Event", InertEvent),
        (torch.cuda, "current_stream", lambda *_: stream),
        (torch.cuda, "default_stream", lambda *_: stream),
        (torch.cuda, "stream", contextlib.nullcontext),
        (torch.Tensor, "record_stream", _nothing),
        (torch.cuda, "synchronize", _nothing),
        (torch.cuda, "empty_cache", _nothing),
        (torch.cuda.nvtx, "range_push", _nothing),
        (torch.cuda.nvtx, "range_pop", _nothing),
        (torch.autograd, "_engine_run_backward", _aimed_backward(run_backward)),
    ]


@contextlib.contextmanager
def cpu_device() -> Iterator[None]:
    """Let megatron-core run on the CPU until the context ends.

    Raises:
        RuntimeError: CUDA is available, so that answering for it would hide the real device.
    """
    if torch.cuda.is_available():
        raise RuntimeError("cpu_device: this process has CUDA; use it, or hide the devices from it")
    logger = logging.getLogger("megatron.core.tensor_parallel.random")
    with contextlib.ExitStack() as undo:
        for owner, name, answer in answers():
            if name in vars(owner):
                undo.callback(setattr, owner, name, getattr(owner, name))
            else:  # inherited: taking the answer away uncovers it again
                undo.callback(delattr, owner, name)
            setattr(owner, name, answer)
        logger.addFilter(_is_not_about_cpu_rng)
        undo.callback(logger.removeFilter, _is_not_about_cpu_rng)
        undo.enter_context(AimAtCpu())
        yield

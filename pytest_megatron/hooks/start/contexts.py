"""CUDA contexts for the ranks of the next session: `--keep-contexts`.

A kept process has an idle process, whose children have the CUDA context of a GPU each. The next
session that fits takes it as its preloaded process, and the children become its first ranks: they
collect for themselves and are never used again. They use the driver alone, so that CUDA is as
uninitialised for torch and for code of the user as in a new process.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import select
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import pytest
from typing_extensions import override

from pytest_megatron.gang.ipc.channel import Channel
from pytest_megatron.gang.ipc.messages import (
    Broken,
    RankConfig,
    Ready,
    StartSession,
)
from pytest_megatron.gang.kept import changed_variables
from pytest_megatron.gang.rank.lockstep import RankPipes
from pytest_megatron.hooks.nodes.leader import DEVICES
from pytest_megatron.hooks.start.collector import SessionInfo, collect_and_serve
from pytest_megatron.hooks.start.environment import find_words
from pytest_megatron.hooks.start.learnt import learn_no_contexts
from pytest_megatron.hooks.start.preload import (
    WaitingRanks,
    fresh_command,
    rank_content,
    receive_rank,
)
from pytest_megatron.process.tree import close_descriptors, run_guarded

_POLL_S = 5.0  # between checks of a GPU's memory
_LEAST_FREE = 0.1  # of the memory of a GPU
_COMPUTE_MODE = 20  # CU_DEVICE_ATTRIBUTE_COMPUTE_MODE; 0 is the default one
_READ_BY_DRIVER = re.compile("CUDA_|CUDBG_|NVIDIA_")
# Names of such variables in a source, but where they are read alone.
_SET_BY_SOURCE = re.compile(
    r"""(?<!get\(["'])(?<!getenv\(["'])(?<=["'])(?:CUDA|CUDBG|NVIDIA)_[A-Z0-9_]+(?=["'](?!\s+(?:not\s+)?in\b))"""
)
_LAZY = {"CUDA_MODULE_LOADING": "LAZY"}  # torch's default, which it sets with its first use of CUDA


class CudaContext:
    """The primary context of a GPU, which is not made current."""

    def __init__(self, ordinal: int) -> None:
        """Create it, with the variables of this process.

        Args:
            ordinal: Index of the GPU among those that this process sees.

        Raises:
            OSError: There is no driver, or it refuses.
        """
        for name, value in _LAZY.items():
            os.environ.setdefault(name, value)
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._context = ctypes.c_void_p()
        device, mode = ctypes.c_int(), ctypes.c_int()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(device), ordinal)
        self._call("cuDeviceGetAttribute", ctypes.byref(mode), _COMPUTE_MODE, device)
        if mode.value:
            raise OSError(f"compute mode {mode.value} of GPU {ordinal} gives it to one process")
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        self.variables = dict(os.environ)

    def find_problem(self) -> str:
        """Return the reason why it should be given up, or ""."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        try:
            self._call("cuCtxPushCurrent_v2", self._context)
            self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
        except OSError as error:
            return str(error)
        is_short = free.value < _LEAST_FREE * total.value
        return f"a GPU has only {free.value >> 20} MiB of memory free" if is_short else ""

    def _call(self, name: str, *arguments: object) -> None:
        code = self._driver[name](*arguments)
        if code:
            raise OSError(f"{name}() returned CUDA error {code}")


class SpareRanks(WaitingRanks):
    """Processes with contexts, each of which becomes one rank.

    Attributes:
        devices: Their `CUDA_VISIBLE_DEVICES`.
    """

    def __init__(self, devices: Sequence[str], take_state: Callable[[StartSession], None]) -> None:
        """Fork them."""
        super().__init__()
        self.devices = os.environ[DEVICES] = ",".join(devices)
        self._size = len(devices)
        for rank in range(self._size):
            self.fork(rank, functools.partial(_run_spare, rank, take_state))

    @override
    def fits(self, info: SessionInfo, rank_config: RankConfig) -> bool:
        """Return whether it has the GPUs of these."""
        del info  # of whatever session
        is_same = rank_config.env.get(DEVICES) == self.devices
        return rank_config.world_size == self._size and is_same


def wait_for_session(
    kept: socket.socket, devices: Sequence[str], take_state: Callable[[StartSession], None]
) -> tuple[StartSession, list[int], SpareRanks]:
    """Make contexts, and wait for a session; end with the kept process, or without a context.

    Args:
        kept: Connection to the kept process.
        devices: UUIDs of GPUs, one for each rank.
        take_state: Gives a process the state that a session had at its start.
    """
    signal.set_wakeup_fd(-1)
    run_guarded(lambda: None)  # goes on in a child
    channel, spares = Channel(kept), SpareRanks(devices, take_state)
    replies = [spare.receive() for spare in spares.channels]
    if all(isinstance(reply, Ready) for reply in replies):
        channel.send(Ready())
        readable, _, _ = select.select([channel, *spares.channels], [], [])
        if channel in readable:
            request, descriptors = channel.receive_with_descriptors()
            if isinstance(request, StartSession):
                for spare in spares.channels:
                    spare.send(request)
                return request, descriptors, spares
        replies = [spare.receive() for spare in spares.channels if spare in readable]
    problems = [reply.problem for reply in replies if isinstance(reply, Broken)]
    channel.send(Broken(problem=(problems or ["a process that had one was killed"])[0]))
    os._exit(0)


def _run_spare(rank: int, take_state: Callable[[StartSession], None], channel: Channel) -> NoReturn:
    """Make a context, wait until this process is to be a rank, and be it."""
    try:
        context = CudaContext(rank)
        problem = ""
    except (OSError, AttributeError) as error:  # a driver that lacks a function
        problem = str(error)
    if not problem:
        channel.send(Ready())
        while not problem and not select.select([channel], [], [], _POLL_S)[0]:
            problem = context.find_problem()
    request = None if problem else channel.receive()
    if not isinstance(request, StartSession):
        channel.send(Broken(problem=problem))
        os._exit(0)
    take_state(request)
    info, config, pipes, descriptors = receive_rank(channel, has_streams=False)
    copies = [os.dup(descriptor) for descriptor in descriptors[:2]]  # `pipes` closes its own
    kept_context = KeptContext(context, info, config, [*copies, *descriptors[2:]])
    if context.find_problem():
        kept_context.start_fresh()
    collect_and_serve(info, config, pipes, kept_context)


@dataclass(slots=True)
class KeptContext:
    """The context of a rank that collects, which must not be noticed.

    Variables that were changed before CUDA is used would be ignored: until the rank has collected,
    it is started again as a fresh interpreter then, and later the use of CUDA fails with the
    reason, as it does in a process that was forked before. No rank has a context in the next
    session.
    """

    _context: CudaContext
    _info: SessionInfo
    _config: RankConfig
    _descriptors: Sequence[int]
    _rank: int = field(default_factory=os.getpid)
    _is_collecting: bool = True

    def begin(self) -> None:
        """Watch the first use of CUDA, before any code of the user runs."""
        self._check_variables()
        cuda = sys.modules.get("torch.cuda")
        if cuda is not None:
            vars(cuda)["_lazy_call"](self._check_variables)
            os.register_at_fork(after_in_child=functools.partial(self._guard_child, vars(cuda)))

    def end_collecting(self, config: pytest.Config) -> None:
        """Return if tests may run with this context."""
        self._check_variables()
        words = find_words(list(sys.modules.values()), config.rootpath, _SET_BY_SOURCE)
        if words:
            self._refuse(words)
        self._is_collecting = False
        for descriptor in self._descriptors[:2]:
            os.close(descriptor)

    def _check_variables(self) -> None:
        now = {**_LAZY, **os.environ}
        changed = changed_variables(self._context.variables, now, _READ_BY_DRIVER)
        if changed:
            self._refuse(f"{', '.join(changed)} is changed before CUDA is used")

    def _guard_child(self, cuda: dict[str, object]) -> None:
        """Have a child that a test forked name the reason why it cannot use CUDA."""
        if not cuda.get("_initialized"):
            refuse = functools.partial(self._refuse, "a process is forked, and uses CUDA")
            cuda["_lazy_init"] = refuse
            bindings = vars(sys.modules["torch._C"])
            if "_cuda_getDeviceCount" in bindings:
                bindings["_cuda_getDeviceCount"] = refuse

    def _refuse(self, reason: str) -> NoReturn:
        learn_no_contexts(self._info.cache, reason)
        if self._is_collecting and os.getpid() == self._rank:
            self.start_fresh()
        raise RuntimeError(
            f"{reason}, and this rank had a CUDA context before, by --keep-contexts; the next "
            f"session starts without: run it again"
        )

    def start_fresh(self) -> NoReturn:
        """Start this rank again, as a fresh interpreter without a context."""
        command = fresh_command(self._info, os.getppid())
        pipes = RankPipes(trigger=self._descriptors[0], notes=self._descriptors[1])
        with tempfile.TemporaryFile() as file:
            file.write(rank_content(self._info, self._config, pipes).encode())
            file.seek(0)
            os.dup2(file.fileno(), 0)
        close_descriptors(self._descriptors)  # also those of the driver
        for descriptor in self._descriptors:
            os.set_inheritable(descriptor, True)  # noqa: FBT003 - of Python
        os.execve(command[0], command, {**self._info.env, **self._config.env})  # noqa: S606 - needs no shell

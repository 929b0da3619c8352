"""Set-up of a rank process: environment, random state, threads, stacks, torch.

Runs in ranks only. It uses torch only if a test has loaded it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TypeAlias

from pytest_megatron.gangs.forkserver.server import STACK_SIGNAL
from pytest_megatron.gangs.ipc.messages import RankConfig
from pytest_megatron.gangs.rank.collectives import count_from_import_on
from pytest_megatron.gangs.rank.lockstep import RankPipes
from pytest_megatron.gangs.rank.logs import FLIGHT_FILE, STACKS_FILE
from pytest_megatron.gangs.topology import RankPlace
from pytest_megatron.process.fork_safety import THREADS, reseed, thread_name
from pytest_megatron.process.originals import os, threading

_RECORDED_COLLECTIVES = "2000"
RandomState: TypeAlias = tuple[object, ...]
_threads: set[str] = set()  # threads of this process at the last check
_device: str | None = None
_cuda: _Cuda | None = None
_open_files: list[object] = []  # as long as this process lives


def rank_env(place: RankPlace, world_size: int) -> dict[str, str]:
    """Return the variables that `torch.distributed.run` sets for a rank, except the store's.

    Source: torch/distributed/elastic/agent/server/local_elastic_agent.py, _start_workers(), 2.13.
    """
    return {
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "GROUP_RANK": str(place.node_rank),
        "GROUP_WORLD_SIZE": str(place.num_nodes),
        "ROLE_RANK": str(place.rank),
        "ROLE_WORLD_SIZE": str(world_size),
        "ROLE_NAME": "default",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


def become_rank(config: RankConfig, pipes: RankPipes, *, random_state: RandomState | None) -> None:
    """Set this process up as a rank.

    Args:
        config: Configuration of the rank.
        pipes: Descriptors that it shares with its agent.
        random_state: State of `random`, if it was seeded: a fork reseeds it.
    """
    global _device  # noqa: PLW0603 - one process, one rank
    _device = config.device
    os.environ.update(config.env)
    directory = Path(config.log_dir)
    write_stacks_on_signal(directory)
    if random_state is not None:
        random.setstate(random_state)
    reseed()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(int(config.env.get("OMP_NUM_THREADS", "1")))
    count_from_import_on()
    _bind_cuda()
    if config.device == "cuda":
        os.environ.setdefault(_recorder_variable(torch), _RECORDED_COLLECTIVES)
        threading.Thread(
            target=_serve_flight_recorder,
            args=(pipes.trigger, directory / FLIGHT_FILE),
            daemon=True,
        ).start()


def device_of_rank() -> str | None:
    """Return `cuda` or `cpu` in a rank, None in any other process."""
    return _device


def write_stacks_on_signal(directory: Path) -> None:
    """Have faulthandler write stacks to stderr on errors, and to a file on STACK_SIGNAL.

    Args:
        directory: Directory of the file, with the logs of the rank.
    """
    faulthandler.enable(file=2)
    try:
        stacks = (directory / STACKS_FILE).open("w")
    except OSError:  # such as a full disk: write stacks to the log
        faulthandler.register(STACK_SIGNAL, file=2, all_threads=True)
    else:
        faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True)
        _open_files.append(stacks)


def state_if_seeded(before: RandomState) -> RandomState | None:
    """Return the state of `random`, or None if it is unchanged.

    Args:
        before: State before any code of the user was imported.
    """
    state = random.getstate()
    return None if state == before else state


def seed_torch(seed: int) -> None:
    """Seed torch when pytest-randomly seeds `random` and numpy; it calls this entry point.

    Only in ranks, so that a test has the same seed on all of them.
    """
    torch = sys.modules.get("torch")
    if _device is not None and torch is not None:
        torch.manual_seed(seed)


def calm_gloo() -> None:
    """Run new threads of gloo under SCHED_BATCH, so that they do not preempt others.

    A message wakes the receiver's loop while the sender still holds the lock of that connection.
    Where ranks share cores, the loop preempts the sender, cannot get the lock, and spins until the
    end of its time slice, some 3 ms. Under SCHED_BATCH it does not preempt.

    Source: gloo/transport/tcp, Pair::handleEvents() and Loop::run(); sched(7).
    """
    if "torch.distributed" not in sys.modules:
        return
    try:
        found = set(os.listdir(THREADS))
    except OSError:  # there is no descriptor left
        return
    new = found - _threads
    _threads.clear()
    _threads.update(found)
    for thread in new:
        with contextlib.suppress(OSError):  # it has ended, or the policy may not be changed
            if (
                "gloo" in thread_name(THREADS / thread)
                and os.sched_getscheduler(int(thread)) == os.SCHED_OTHER
            ):
                os.sched_setscheduler(int(thread), os.SCHED_BATCH, os.sched_param(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cuda:
    """Functions of torch's CUDA, as they were before a test could patch them.

    Attributes:
        variables: Variables of the module `torch.cuda`.
        synchronize: Waits for the current device; `torch.cuda.synchronize` calls functions that
            tests patch.
        run_kernel: Runs a kernel and waits for its result.
    """

    variables: Mapping[str, object]
    synchronize: Callable[[], None]
    run_kernel: Callable[[], object]

    @property
    def is_initialized(self) -> bool:
        return bool(self.variables.get("_initialized"))


def _bind_cuda() -> _Cuda | None:
    """Return CUDA of the loaded torch, or None if it has none."""
    global _cuda  # noqa: PLW0603 - one process, one torch
    torch, cuda = sys.modules.get("torch"), sys.modules.get("torch.cuda")
    if _cuda is None and isinstance(torch, ModuleType) and isinstance(cuda, ModuleType):
        synchronize = getattr(getattr(torch, "_C", None), "_cuda_synchronize", None)
        if synchronize is not None and hasattr(torch, "zeros"):
            zeros = torch.zeros
            _cuda = _Cuda(
                variables=vars(cuda),
                synchronize=synchronize,
                run_kernel=lambda: zeros(1, device="cuda").add_(1).item(),
            )
    return _cuda


def synchronize() -> None:
    """Wait for the GPU, so that an unmatched collective hangs in its own test."""
    cuda = _bind_cuda()
    if cuda is not None and cuda.is_initialized:
        cuda.synchronize()


def find_poison() -> str:
    """Return the error of a GPU that this process can no longer use, or ""."""
    cuda = _bind_cuda()
    if cuda is None or not cuda.is_initialized:
        return ""
    try:
        cuda.synchronize()
        cuda.run_kernel()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""


def _recorder_variable(torch: object) -> str:
    """Return the variable that enables the flight recorder, which depends on torch's release."""
    words = str(getattr(torch, "__version__", "0.0")).split(".")
    is_new = tuple(int(word) for word in words[:2] if word.isdecimal()) >= (2, 10)
    return "TORCH_FR_BUFFER_SIZE" if is_new else "TORCH_NCCL_TRACE_BUFFER_SIZE"


def _serve_flight_recorder(trigger: int, path: Path) -> None:
    """Write NCCL's flight record for each byte of the pipe."""
    while os.read(trigger, 1):
        text = _flight_record()
        with contextlib.suppress(OSError):
            written = path.with_suffix(".part")
            written.write_text(text or "{}")
            written.replace(path)


def _flight_record() -> str:
    """Return NCCL's flight recorder as JSON, "" without one."""
    c10d = sys.modules.get("torch._C._distributed_c10d")
    dump = getattr(c10d, "_dump_nccl_trace_json", None)
    if dump is None:
        return ""
    try:
        record = dump(includeCollectives=True, onlyActive=False)
    except (RuntimeError, TypeError):
        return ""
    return record.decode(errors="replace") if isinstance(record, bytes) else str(record)

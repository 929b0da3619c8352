"""Makes a forked or fresh process a rank: environment, random state, threads, stacks, torch.

Runs in ranks only; the one place that touches torch, and only where a test has loaded it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import random
import secrets
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TypeAlias

from pytest_megatron.gang.forkserver.fork_safety import THREADS, thread_name
from pytest_megatron.gang.forkserver.server import STACK_SIGNAL
from pytest_megatron.gang.ipc.messages import RankConfig
from pytest_megatron.gang.originals import os, threading
from pytest_megatron.gang.rank.collectives import count_from_import_on
from pytest_megatron.gang.rank.lockstep import RankPipes
from pytest_megatron.gang.rank.logs import FLIGHT_FILE, STACKS_FILE
from pytest_megatron.gang.topology import RankPlace

# Whether CUDA is there is asked of NVML, which leaves this process fit to be forked; so do pools of
# one thread.
HARMLESS_ENV = {
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
_RECORDED_COLLECTIVES = "2000"
RandomState: TypeAlias = tuple[object, ...]
# torch seeds its generator with 64 random bits; who seeds it himself takes a smaller number.
_LEAST_RANDOM_SEED = 1 << 53
_threads: set[str] = set()  # of this process, as they were looked at last
_device: str | None = None
_cuda: _Cuda | None = None
_open_files: list[object] = []  # as long as this process lives


def rank_env(place: RankPlace, world_size: int) -> dict[str, str]:
    """Return the variables that `torch.distributed.run` sets for a rank, but for the store's.

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
    """Set this process up as the rank of `order`.

    Args:
        config: Which rank.
        pipes: What it shares with its fork server.
        random_state: Of `random`, if something seeded it: a fork seeds it anew.
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
    """Have faulthandler write stacks into the directory of logs, on errors and on STACK_SIGNAL."""
    faulthandler.enable(file=2)
    try:
        stacks = (directory / STACKS_FILE).open("w")
    except OSError:  # a full disk: stacks go to the log, if anywhere
        faulthandler.register(STACK_SIGNAL, file=2, all_threads=True)
    else:
        faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True)
        _open_files.append(stacks)


def state_if_seeded(before: RandomState) -> RandomState | None:
    """Return the state of `random`, or None as long as nobody has touched it.

    Args:
        before: State before anything of the user's was imported.
    """
    state = random.getstate()
    return None if state == before else state


def reseed() -> None:
    """Give this process numbers of its own from numpy and torch, as long as nobody seeded them.

    Python's `random` does so by itself at a fork.
    """
    mtrand = sys.modules.get("numpy.random.mtrand")
    if mtrand is not None:
        bits = mtrand._rand._bit_generator  # tells whether it was seeded
        if getattr(bits, "_seed_seq", None) is not None:
            mtrand.set_state(mtrand.RandomState().get_state())
    torch = sys.modules.get("torch")
    if torch is not None and torch.initial_seed() >= _LEAST_RANDOM_SEED:
        torch.default_generator.manual_seed(secrets.randbits(64) | _LEAST_RANDOM_SEED)


def seed_torch(seed: int) -> None:
    """Seed torch where pytest-randomly seeds `random` and numpy; it calls this entry point.

    Only in ranks: there a test that passes with one seed on all of them shall not see another.
    """
    torch = sys.modules.get("torch")
    if _device is not None and torch is not None:
        torch.manual_seed(seed)


def calm_gloo() -> None:
    """Have threads of gloo that are new wait for a core instead of taking it from one at work.

    A message wakes the receiver's loop while the sender still holds the lock of that connection.
    Where ranks share cores, the loop pushes the sender aside, cannot have the lock, and asks for it
    again and again until its time is up: some 3 ms. Under SCHED_BATCH it does not push.

    Source: gloo/transport/tcp, Pair::handleEvents() and Loop::run(); sched(7).
    """
    if "torch.distributed" not in sys.modules:
        return
    found = set(os.listdir(THREADS))
    new = found - _threads
    _threads.clear()
    _threads.update(found)
    for thread in new:
        with contextlib.suppress(OSError):  # it has ended, or this may not be changed here
            if (
                "gloo" in thread_name(THREADS / thread)
                and os.sched_getscheduler(int(thread)) == os.SCHED_OTHER
            ):
                os.sched_setscheduler(int(thread), os.SCHED_BATCH, os.sched_param(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cuda:
    """What is needed of torch's CUDA, as it was before a test could patch it.

    Attributes:
        variables: Of the module `torch.cuda`.
        synchronize: Waits for the current device; `torch.cuda.synchronize` would ask functions
            that tests patch which one that is.
        run_kernel: Runs a kernel and waits for its result.
    """

    variables: Mapping[str, object]
    synchronize: Callable[[], None]
    run_kernel: Callable[[], object]

    @property
    def is_initialized(self) -> bool:
        return bool(self.variables.get("_initialized"))


def _bind_cuda() -> _Cuda | None:
    """Return CUDA of the torch that this process has loaded, once it has one with CUDA."""
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
    """Wait for the GPU, so that a collective that nobody answers hangs in the test it is of."""
    cuda = _bind_cuda()
    if cuda is not None and cuda.is_initialized:
        cuda.synchronize()


def find_poison() -> str:
    """Return why this process can use its GPU no longer, or ""."""
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
    """Return what turns the flight recorder on; older releases know it by another name."""
    words = str(getattr(torch, "__version__", "0.0")).split(".")
    is_new = tuple(int(word) for word in words[:2] if word.isdecimal()) >= (2, 10)
    return "TORCH_FR_BUFFER_SIZE" if is_new else "TORCH_NCCL_TRACE_BUFFER_SIZE"


def _serve_flight_recorder(trigger: int, path: Path) -> None:
    """Write what NCCL recorded whenever it is asked for."""
    while os.read(trigger, 1):
        text = _flight_record()
        with contextlib.suppress(OSError):
            written = path.with_suffix(".part")
            written.write_text(text or "{}")
            written.replace(path)


def _flight_record() -> str:
    c10d = sys.modules.get("torch._C._distributed_c10d")
    dump = getattr(c10d, "_dump_nccl_trace_json", None)
    if dump is None:
        return ""
    try:
        record = dump(includeCollectives=True, onlyActive=False)
    except (RuntimeError, TypeError):
        return ""
    return record.decode(errors="replace") if isinstance(record, bytes) else str(record)

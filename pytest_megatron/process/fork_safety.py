"""State that a fork would break: CUDA contexts, threads, and seeds of random numbers.

A CUDA context is unusable after a fork; threads do not survive a fork, and the locks they hold stay
locked. NVML is harmless, and so are pools that handle forks (OpenBLAS) and idle threads of execnet
under pytest-xdist.
"""

from __future__ import annotations

import ctypes
import os
import re
import secrets
import sys
import threading
from pathlib import Path
from types import FrameType

# Detect CUDA with NVML and use pools of one thread, so that a process can be forked.
HARMLESS_ENV = {
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
THREADS = Path("/proc/self/task")
_CUDA_DEVICE = "/dev/nvidia-uvm"  # CUDA opens it for a context, NVML never
_CONTROLLER_THREADS = ("execnet", "pytest_rerunfailures")
# torch seeds its generator with 64 random bits; seeds that users choose are smaller.
_LEAST_RANDOM_SEED = 1 << 53
_OPENBLAS = re.compile(r"\S*/lib\S*openblas\S*\.so\S*")
_COUNTERS = (
    "scipy_openblas_get_num_threads64_",
    "scipy_openblas_get_num_threads",
    "openblas_get_num_threads64_",
    "openblas_get_num_threads",
)


def find_obstacle(since: str = "the tests were collected") -> str:
    """Return the reason why this process must not be forked, or "".

    Args:
        since: When it may have begun, in words.
    """
    if _has_cuda():
        return f"CUDA was used when {since}"
    names = _python_threads()
    if names:
        return f"threads run since {since}: {', '.join(sorted(names))}"
    num_others = _count_tasks() - len(sys._current_frames())  # knows all of Python's
    if num_others > 0 and num_others > _count_openblas():
        return f"{num_others} threads of libraries run since {since}"
    return ""


def _has_cuda() -> bool:
    """Return whether this process has opened a GPU."""
    for path in Path("/proc/self/fd").iterdir():
        try:
            target = str(path.readlink())
        except OSError:  # such as the descriptor of this listing
            continue
        if target.startswith(_CUDA_DEVICE):
            return True
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda is not None and bool(cuda.is_initialized())


def _python_threads() -> list[str]:
    """Return the names of Python's threads except this one, the main one and those of plugins."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    own = (threading.get_ident(), threading.main_thread().ident)
    frames = sys._current_frames()  # also knows threads that `threading` does not
    return [
        names.get(ident, f"thread {ident}")
        for ident, frame in frames.items()
        if ident not in own and not _is_of_controller(frame)
    ]


def _is_of_controller(frame: FrameType | None) -> bool:
    """Return whether a thread belongs to a plugin of the controller, which no rank needs."""
    while frame is not None:
        if any(name in frame.f_code.co_filename for name in _CONTROLLER_THREADS):
            return True
        frame = frame.f_back
    return False


def _count_tasks() -> int:
    """Return the number of threads of this process without that of NVIDIA's driver library.

    Importing torch starts it; without a context it only waits, and forks do not need it.
    """
    return sum(not thread_name(task).startswith("cuda") for task in THREADS.iterdir())


def thread_name(task: Path) -> str:
    """Return the name of a thread, or "" if it has ended.

    Args:
        task: One of `THREADS`.
    """
    try:
        return (task / "comm").read_text(errors="replace")
    except OSError:  # it has ended meanwhile
        return ""


def _count_openblas() -> int:
    """Return the size of OpenBLAS's pools, which it restarts around a fork."""
    maps = Path("/proc/self/maps").read_text(errors="replace")
    num_threads = 0
    for path in sorted(set(_OPENBLAS.findall(maps))):
        try:
            library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD)
        except OSError:
            continue
        for name in _COUNTERS:
            counter = getattr(library, name, None)
            if counter is not None:
                num_threads += int(counter()) - 1
                break
    return num_threads


def reseed(*, has_user_code: bool = True) -> None:
    """Reseed numpy and torch for this process, unless they were seeded.

    Python reseeds `random` at a fork.

    Args:
        has_user_code: True if code of the user may have seeded them before the fork.
    """
    mtrand = sys.modules.get("numpy.random.mtrand")
    if mtrand is not None:
        bits = mtrand._rand._bit_generator  # shows whether it was seeded
        if getattr(bits, "_seed_seq", None) is not None:
            mtrand.set_state(mtrand.RandomState().get_state())
    torch = sys.modules.get("torch")
    if torch is not None and not (has_user_code and torch.initial_seed() < _LEAST_RANDOM_SEED):
        torch.default_generator.manual_seed(secrets.randbits(64) | _LEAST_RANDOM_SEED)

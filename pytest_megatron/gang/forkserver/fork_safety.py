"""Whether this process may be forked: what a fork would break, found from what the kernel shows.

A context of CUDA is of no use after a fork, and a thread does not come along, but the locks that it
holds do. NVML does neither harm, nor do pools that know of forks (OpenBLAS) or that wait idly in
execnet's loop under pytest-xdist.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import threading
from pathlib import Path
from types import FrameType

THREADS = Path("/proc/self/task")
_CUDA_DEVICE = "/dev/nvidia-uvm"  # CUDA opens it for a context, NVML never
_CONTROLLER_THREADS = ("execnet", "pytest_rerunfailures")
_OPENBLAS = re.compile(r"\S*/lib\S*openblas\S*\.so\S*")
_COUNTERS = (
    "scipy_openblas_get_num_threads64_",
    "scipy_openblas_get_num_threads",
    "openblas_get_num_threads64_",
    "openblas_get_num_threads",
)


def find_obstacle() -> str:
    """Return why this process must not be forked, or ""."""
    if _has_cuda():
        return "CUDA was used while the tests were collected"
    names = _python_threads()
    if names:
        return f"threads run since the tests were collected: {', '.join(sorted(names))}"
    num_others = _count_tasks() - len(sys._current_frames())  # knows all of Python's
    if num_others > 0 and num_others > _count_openblas():
        return f"{num_others} threads of libraries run since the tests were collected"
    return ""


def _has_cuda() -> bool:
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
    """Return the names of Python's threads, but for this one, the main one and plugins'."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    own = (threading.get_ident(), threading.main_thread().ident)
    frames = sys._current_frames()  # also knows threads that `threading` does not
    return [
        names.get(ident, f"thread {ident}")
        for ident, frame in frames.items()
        if ident not in own and not _is_of_controller(frame)
    ]


def _is_of_controller(frame: FrameType | None) -> bool:
    """Whether a thread is of a plugin that acts for the session, and that no rank needs."""
    while frame is not None:
        if any(name in frame.f_code.co_filename for name in _CONTROLLER_THREADS):
            return True
        frame = frame.f_back
    return False


def _count_tasks() -> int:
    """Return the threads of this process, but for the one that NVIDIA's driver library starts.

    torch starts it by being imported; without a context it only waits, and no fork misses it.
    """
    return sum(not thread_name(task).startswith("cuda") for task in THREADS.iterdir())


def thread_name(task: Path) -> str:
    """Return what a thread is called, or "" if it has ended.

    Args:
        task: One of `THREADS`.
    """
    try:
        return (task / "comm").read_text(errors="replace")
    except OSError:  # it ended while we looked
        return ""


def _count_openblas() -> int:
    """Return the size of OpenBLAS's pools, which are shut down and set up again around a fork."""
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

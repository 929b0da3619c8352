"""What the process of a rank holds: groups, CUDA memory, threads, processes, variables (effects).

A look lists it by keys, and only what is new is described. What libraries keep from their first use
on is no leak of the test that used them first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Protocol, TypeAlias, cast

from pytest_megatron.base.text import counted, listed
from pytest_megatron.process.originals import os, threading

# Kind, and what tells it from others of its kind.
Thing: TypeAlias = tuple[str, object]
Things: TypeAlias = frozenset[Thing]

KINDS = ("groups", "threads", "processes", "environment")
_open = open  # a test may leave another one
_MOST_LISTED = 3
_DUMMY = "_DummyThread"  # of a thread that Python has not started, such as one of autograd
_THREADS_OF_LIBRARIES = (
    *("tqdm", "torch._inductor", "pytest_megatron", "pytest_timeout", "debugpy"),
    "concurrent.futures",  # pools, such as the one that Inductor compiles in
)
_PROCESSES_OF_LIBRARIES = ("resource_tracker", "forkserver", "compile_worker", "debugpy")
# They set variables at their first use, as pytest does for each test.
_VARIABLES_OF_LIBRARIES = frozenset(
    (
        *("PYTEST_CURRENT_TEST", "CUDA_MODULE_LOADING", "KINETO_LOG_LEVEL", "LRU_CACHE_CAPACITY"),
        *("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "KMP_INIT_AT_FORK"),
        *("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "TRITON_PTXAS_PATH", "TORCH_WARM_POOL"),
        *("TRITON_LIBDEVICE_PATH", "DISABLE_CUPTI_LAZY_REINIT", "TEARDOWN_CUPTI"),
        *("KMP_DUPLICATE_LIB_OK", "QT_QPA_FONTDIR", "TF2_BEHAVIOR", "TF_CPP_MIN_LOG_LEVEL"),
        *("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"),  # of the rank
    )
)


class _GroupRegistry(Protocol):
    """Interface of the process groups that torch has."""

    default_pg: object
    pg_names: Mapping[object, str]


class _TorchCuda(Protocol):
    """Interface of `torch.cuda`."""

    def is_initialized(self) -> bool: ...

    def device_count(self) -> int: ...

    def memory_allocated(self, device: int) -> int: ...


class _Thread(Protocol):
    """Interface of a thread."""

    name: str


class Look:
    """Looks at this process, and knows which variables it had at first."""

    def __init__(self, restored: Iterable[str] = ()) -> None:
        """Take the variables of this process.

        Args:
            restored: Those that are put back after each test, which are no leak.
        """
        self._left_out = _VARIABLES_OF_LIBRARIES | {*restored}
        self._names = {*os.environ}

    def things(self) -> Things:
        """Return what the process holds, memory apart."""
        names = (self._names | {*os.environ}) - self._left_out
        return frozenset(
            [
                *(("environment", (name, os.environ.get(name))) for name in names),
                *(("threads", thread) for thread in threading.enumerate()),
                *(("processes", pid) for pid in _children()),
                *(("groups", key) for key in _groups()),
            ]
        )


def cuda_bytes() -> int:
    """Return the bytes of GPUs that torch's allocator has given out; 0 before the first use."""
    cuda = cast("_TorchCuda | None", sys.modules.get("torch.cuda"))
    if cuda is None or not cuda.is_initialized():
        return 0
    return sum(map(cuda.memory_allocated, range(cuda.device_count())))


def free_workspaces() -> None:
    """Free the workspaces of cuBLAS, which torch allocates with its first product."""
    clear = _variable("torch._C", "_cuda_clearCublasWorkspaces")
    if callable(clear) and cuda_bytes():
        clear()


def _variable(module: str, name: str) -> object:
    """Return a variable of a loaded module, or None; modules may import what they lack."""
    return getattr(sys.modules.get(module), "__dict__", {}).get(name)


def _groups() -> list[tuple[int, str]]:
    """Return identity and name of each process group but the default one."""
    found = cast("_GroupRegistry | None", _variable("torch.distributed.distributed_c10d", "_world"))
    if found is None:
        return []
    return [
        (id(group), name) for group, name in found.pg_names.items() if group is not found.default_pg
    ]


def _children() -> list[int]:
    """Return child processes, which are listed by the thread that started them.

    Those of threads that Python knows: NCCL and gloo have a thousand of their own where a suite
    destroys no groups, start no processes, and would take 50 ms after each test.
    """
    found: list[int] = []
    threads = {thread.native_id for thread in threading.enumerate()}
    for thread in threads | {os.getpid()}:  # of the main one: in a forked process it has another
        try:
            with _open(f"/proc/self/task/{thread}/children") as file:
                found += map(int, file.read().split())
        except OSError:
            continue
    return found


def describe(things: Collection[Thing]) -> list[str]:
    """Return what things are, in words, by kind; nothing for those that libraries keep."""
    return [
        text
        for kind in KINDS
        if (keys := [key for other, key in things if other == kind])
        and (text := _DESCRIBE[kind](keys))
    ]


def _describe_groups(keys: Collection[object]) -> str:
    return counted(len(keys), "process group")


def _describe_threads(keys: Collection[object]) -> str:
    """Name threads, but for those of libraries."""
    names = []
    for thread in cast("Collection[_Thread]", keys):
        target = vars(thread).get("_target")
        places = (type(thread).__module__, str(getattr(target, "__module__", "")))
        is_of_library = any(place.startswith(_THREADS_OF_LIBRARIES) for place in places)
        if not is_of_library and type(thread).__name__ != _DUMMY:
            names.append(thread.name)
    what = f"{counted(len(names), 'thread')} ({listed(sorted(names), _MOST_LISTED)})"
    return what if names else ""


def _describe_processes(keys: Collection[object]) -> str:
    """Name child processes by their commands, but for those of libraries."""
    names = []
    for pid in keys:
        try:
            with _open(f"/proc/{pid}/cmdline", "rb") as file:
                command = file.read().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue
        if not any(name in command for name in _PROCESSES_OF_LIBRARIES):
            names.append(command or f"{pid}, which nothing has waited for")
    number = counted(len(names), "child process", "child processes")
    return f"{number} ({listed(sorted(names), _MOST_LISTED)})" if names else ""


def _describe_environment(keys: Collection[object]) -> str:
    """Name variables without their values, which may be secret."""
    found = sorted(cast("Collection[tuple[str, str | None]]", keys))
    texts = [f"{name} {'unset' if value is None else 'set'}" for name, value in found]
    return f"environment: {listed(texts, _MOST_LISTED)}"


_DESCRIBE: Mapping[str, Callable[[Collection[object]], str]] = {
    "groups": _describe_groups,
    "threads": _describe_threads,
    "processes": _describe_processes,
    "environment": _describe_environment,
}

"""Audit of what a test leaves in the process of its rank; runs in ranks only (effects).

A look takes a fraction of a millisecond: it lists what the process holds by keys and plain values.
Only where keys are new are they described, after garbage was collected, as an object in a cycle is
no leak. It looks beside tests that patch anything, at the set-up of a fixture even while it is
patched: functions are bound here, and where a probe fails, what it found last counts.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import signal
import sys
import termios
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from types import FunctionType, ModuleType
from typing import Protocol, TypeAlias, cast

from pytest_megatron.base.text import counted, listed
from pytest_megatron.gangs.rank.bootstrap import (
    cuda_device,
    cuda_memory,
    cuda_settings,
    free_cublas,
)
from pytest_megatron.gangs.rank.settings import (
    Held,
    Key,
    PythonSettings,
    TorchSettings,
    do_versions_work,
    version_of,
)
from pytest_megatron.process.originals import os, threading, time

KINDS = (
    "groups",
    "cuda-memory",
    "host-memory",
    "threads",
    "files",
    "processes",
    "environment",
    "signals",
    "warnings",
    "torch",
    "python",
    "megatron",
    "patches",
    "working-directory",
)
CURRENT_GPU: Key = ("torch", "current CUDA device")
LIMIT_OF_FILES: Key = ("python", "limit of open files")
_MOST_LISTED = 3
_BEFORE_CUDA = {"cuda-memory": 0, "reserved": 0}  # until a test uses it
_MOST_SHOWN = 60  # characters of a setting
_MOST_CUDA_BYTES = 1 << 20
_MOST_HOST_BYTES = 256 << 20  # the heap of libraries grows, too
_MOST_HOST_BYTES_WITH_CUDA = 1 << 30  # NCCL's first communicator takes 360 MiB
_MIB = 1 << 20
_THREAD_S = 0.2  # for threads that were asked to end
_TICK_S = 0.005
_PAGE = os.sysconf("SC_PAGE_SIZE")
# Without the conversion to an enum, which takes longer.
_get_handler = cast("Callable[[int], object]", vars(signal)["_signal"].getsignal)
_DEFAULT_HANDLER = int(signal.SIG_DFL)
_collect_garbage = gc.collect
_open = open
_SIGNALS = tuple((int(s), s.name) for s in signal.Signals if s < signal.SIGRTMIN)
_DESCRIPTORS = "/proc/self/fd"
# Libraries keep one thread, or process, from its first use on.
_THREADS_OF_LIBRARIES = ("tqdm", "torch._inductor", "pytest_megatron", "pytest_timeout", "debugpy")
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
_SHARED_MEMORY = "/dev/shm/"  # noqa: S108 - a prefix
_PLACES_OF_LIBRARIES = ("/dev/", "/proc/", "/sys/", "/usr/", "/etc/", "/memfd:", "/opt/")
_STATE_MODULES = {
    "megatron.core.parallel_state": "parallel state of megatron-core",
    "megatron.core.num_microbatches_calculator": "number of microbatches of megatron-core",
    "megatron.training.global_vars": "global variables of megatron.training",
}
_BUFFER, _TRACKER = "_GLOBAL_MEMORY_BUFFER", "_CUDA_RNG_STATE_TRACKER"
_RANDOM = "megatron.core.tensor_parallel.random"
_PATCHED_MODULES = (
    *("torch", "torch.autograd", "torch.cuda", "torch.distributed", "torch.nn.functional"),
    *("torch.distributed.distributed_c10d", "torch.random", "torch.utils.checkpoint"),
    *("torch.nn", "torch.nn.init", "torch.nn.parallel", "torch.optim", "torch.utils.data"),
    *("torch.distributed.device_mesh", "torch.distributed.fsdp", "torch.distributed.tensor"),
)
# None is all of their classes.
_PATCHED_CLASSES = {"torch": ("Tensor",), "torch.nn": None, "torch.optim": None}
_MEGATRON = "megatron."
_WRAPPERS = ("torch._compile", "torch._dynamo.eval_frame")  # have `disable`
# Modules of torch that replace something at their first use: the first `torch.compile` methods of
# `Module`, the first loader with workers the handler of SIGCHLD, the first optimizer of a class its
_REPLACERS = (
    *("torch._dynamo.mutation_guard", "torch.utils.data._utils.signal_handling"),
    "torch.optim.optimizer",  # `step` of each class, for the profiler
)
_OF_A_SETTING = ("torch.Storage",)  # which follows the default dtype


class _HeldGroup(Protocol):
    """Interface of a process group."""

    def size(self) -> int: ...


class _GroupRegistry(Protocol):
    """Interface of the groups that torch has."""

    default_pg: _HeldGroup | None
    pg_names: Mapping[_HeldGroup, str]
    group_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Leak:
    """What a test left behind of one kind.

    Attributes:
        fixture: The fixture of a wider scope that made it, and was torn down; "" if the test did.
    """

    kind: str
    text: str
    fixture: str = ""


@dataclass(slots=True)
class _Patched:
    """Functions and classes of a module or class, as they were when it was loaded."""

    name: str
    attributes: Mapping[str, object]
    last: list[object] = field(init=False)
    original: dict[str, object] = field(init=False)
    found: Held = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.last = list(self.attributes.values())
        self.original = {k: v for k, v in self.attributes.items() if callable(v)}

    def look(self) -> Held:
        """Return what was replaced, added to a class or removed, and not by this plugin."""
        now = list(self.attributes.values())
        if _are_same(now, self.last):
            return self.found
        self.last = now
        changed = {k for k, v in self.original.items() if self.attributes.get(k) is not v}
        if not isinstance(self.attributes, dict):  # of a class
            new = self.attributes.keys() - self.original.keys()
            changed |= {k for k in new if isinstance(self.attributes[k], FunctionType)}
        self.found = {
            ("patches", f"{self.name}.{name}"): id(self.attributes.get(name))
            for name in changed
            if not _is_own(self.attributes.get(name))
            and not _is_left_to_eager(self.attributes.get(name), self.original.get(name))
            and not _is_own(self.original.get(name))
            and not _is_of_torch(self.attributes.get(name))
            and f"{self.name}.{name}" not in _OF_A_SETTING
        }
        return self.found


def _are_same(now: object, last: object) -> bool:
    """Return whether collections hold the same; equal objects of another identity may count."""
    try:
        return now == last
    except Exception:  # noqa: BLE001 - comparing an array, or what a test has patched
        return False


def _is_own(value: object) -> bool:
    return str(getattr(value, "__module__", "")).startswith("pytest_megatron")


def _is_of_torch(value: object) -> bool:
    """Return true for a function by which torch itself replaces another."""
    return isinstance(value, FunctionType) and value.__globals__.get("__name__") in _REPLACERS


def _is_left_to_eager(value: object, original: object) -> bool:
    """Return true for an original that torch only keeps out of compiled code.

    `torch._dynamo` wraps functions of torch when it is loaded, as the first optimizer does, and
    methods of optimizers, also inherited ones, when it compiles for the first time.
    """
    if not isinstance(value, FunctionType) or value.__globals__.get("__name__") not in _WRAPPERS:
        return False
    wrapped = vars(value).get("__wrapped__")
    return original is None or wrapped is original or _is_of_torch(wrapped)


class LeakAudit:
    """Probes of this process.

    Attributes:
        own_gpu: Index of the GPU that tests of this rank make the current one.
    """

    def __init__(self, restored: Iterable[str] = ()) -> None:
        """Look at this process for the first time, before any test.

        Args:
            restored: Variables that are put back after each test.
        """
        self._left_out = {name.encode() for name in (*_VARIABLES_OF_LIBRARIES, *restored)}
        self._patched: dict[str, _Patched] = {}
        self._states: list[tuple[Mapping[str, object], tuple[str, ...]]] = []
        self._num_modules = 0
        self._has_versions = do_versions_work()
        self._versions: list[ctypes.c_uint64] = []
        self._last_versions: list[int] = []
        self._in_modules: Held = {}
        self._held: Held = {}
        self._directory = os.getcwd()
        self._changed_ns = 0
        self._files: Held = {}
        self._environ = cast("Mapping[bytes, bytes]", vars(os.environ)["_data"])
        self._last_environ: Mapping[bytes, bytes] = {}
        self._variables: Held = {}
        self._descriptors: Held = {}
        self._descriptors_seen = (0, 0)
        self._groups: Held = {}
        self._groups_seen = (0, 0, 0)
        self._num_groups = -1
        self.own_gpu = int(os.environ.get("LOCAL_RANK", "0"))
        self._has_used_own_gpu = False
        self._probes: tuple[Callable[[], Held], ...] = (
            self._look_at_variables,
            _handlers_of_signals,
            _running_threads,
            self._look_at_descriptors,
            _filters,
            _children,
            self._look_at_modules,
            TorchSettings().look,
            PythonSettings().look,
            self._look_at_cuda,
            self._look_at_groups,
            self._look_at_megatron,
            self.list_directory,
        )
        self._found: dict[Callable[[], Held], Held] = {}
        self.look()

    def look(self) -> Held:
        """Return what the process holds; the same object if that is what it held before."""
        is_same = True
        for probe in self._probes:
            last = self._found.get(probe)
            try:
                found = probe()
            except Exception:  # noqa: BLE001 - of what a test has patched
                found = last or {}
            is_same = is_same and (found is last or _are_same(found, last))
            self._found[probe] = found
        if not is_same:
            self._held = {}
            for found in self._found.values():
                self._held |= found
        return self._held

    def sizes(self) -> dict[str, int]:
        """Return bytes of memory by kind; none where a test has patched what tells them."""
        try:
            descriptor = os.open("/proc/self/statm", os.O_RDONLY)
            try:
                resident = int(os.read(descriptor, 128).split()[1]) * _PAGE
            finally:
                os.close(descriptor)
            cuda = cuda_memory() or _BEFORE_CUDA
        except Exception:  # noqa: BLE001
            return {}
        return {"host-memory": resident, **cuda}

    def settle(self, kinds: set[str]) -> None:
        """Free what nothing refers to, and wait a moment for threads that end."""
        _collect_garbage()
        if "cuda-memory" in kinds:
            free_cublas()
        until = time.monotonic() + _THREAD_S
        ending = [thread for thread in threading.enumerate() if not thread.daemon]
        while kinds & {"threads", "processes"} and ending and time.monotonic() < until:
            ending = [thread for thread in ending if thread.is_alive()]
            time.sleep(_TICK_S)

    def find_size_leaks(self, before: Mapping[str, int], now: Mapping[str, int]) -> list[Leak]:
        """Return memory that the process has more of than before, beyond a limit."""
        grown = {kind: now[kind] - before.get(kind, now[kind]) for kind in now}
        leaks = []
        most = _MOST_HOST_BYTES_WITH_CUDA if now.get("reserved") else _MOST_HOST_BYTES
        if grown.get("host-memory", 0) > most:
            leaks.append(
                Leak(kind="host-memory", text=f"{_mib(grown['host-memory'])} of host memory")
            )
        if grown.get("cuda-memory", 0) > _MOST_CUDA_BYTES:
            reserved = _mib(max(0, grown["reserved"]))
            text = f"{_mib(grown['cuda-memory'])} of CUDA memory ({reserved} reserved)"
            leaks.append(Leak(kind="cuda-memory", text=text))
        return leaks

    def describe(self, changes: Iterable[tuple[Key, object, object, str]]) -> list[Leak]:
        """Return what changed, in words.

        Args:
            changes: Key, value, value before (None is none) and the fixture that made it, or "".
        """
        by_kind = sorted(changes, key=lambda c: (KINDS.index(c[0][0]), c[3], str(c[0][1])))
        leaks = []
        for (kind, fixture), found in groupby(by_kind, key=lambda c: (c[0][0], c[3])):
            rows = [(name, value, was) for (_, name), value, was, _ in found]
            texts = _DESCRIBE[kind](rows)
            leaks += [Leak(kind=kind, text=text, fixture=fixture) for text in texts]
        return leaks

    def is_connecting(self) -> bool:
        """Return whether torch may have opened sockets and pipes since the last call.

        Groups have some, and CUDA and NCCL open more of them at any time.
        """
        world = group_registry()
        count = 0 if world is None else world.group_count
        last, self._num_groups = self._num_groups, count
        return count != last or bool(cuda_memory())

    def _look_at_variables(self) -> Held:
        """Return the variables of the environment."""
        if self._environ != self._last_environ:
            self._last_environ = dict(self._environ)
            self._variables = {
                ("environment", name): value
                for name, value in self._last_environ.items()
                if name not in self._left_out
            }
        return self._variables

    def _look_at_descriptors(self) -> Held:
        """Return open descriptors, without the one by which they are listed.

        They are the same where their number is, as Linux 6.2 and later know it, and the lowest free
        one: to list some thousands, of groups that nobody destroys, takes milliseconds.
        """
        try:
            lowest_free = os.dup(2)
            os.close(lowest_free)  # the next one gets its number
            seen = os.stat(_DESCRIPTORS).st_size, lowest_free
            if seen[0] and seen == self._descriptors_seen:
                return self._descriptors
            found = os.listdir(_DESCRIPTORS)
        except OSError:  # none is free, or 2 is closed
            return {}
        own = str(lowest_free)
        self._descriptors = {("files", number): "" for number in found if number != own}
        self._descriptors_seen = seen
        return self._descriptors

    def _look_at_modules(self) -> Held:
        """Return what was patched in modules."""
        if len(sys.modules) != self._num_modules:
            self._bind_modules()
        versions = [version.value for version in self._versions]
        if not versions or versions != self._last_versions:
            self._last_versions = versions
            self._in_modules = {}
            for patched in self._patched.values():
                self._in_modules |= patched.look()
        return self._in_modules

    def _bind_modules(self) -> None:
        """Take modules that were loaded meanwhile as they are now."""
        self._num_modules = len(sys.modules)
        names = [n for n in list(sys.modules) if n in _PATCHED_MODULES or n.startswith(_MEGATRON)]
        for name in names:
            module = sys.modules.get(name)
            if name not in self._patched and isinstance(module, ModuleType):
                self._patched[name] = _Patched(name, vars(module))
                if name in _STATE_MODULES:
                    self._states.append((vars(module), _state_names(module)))
        for name, classes in _PATCHED_CLASSES.items():
            for of_module, cls in list(getattr(sys.modules.get(name), "__dict__", {}).items()):
                if classes is not None and of_module not in classes:
                    continue
                path = f"{name}.{of_module}"
                if isinstance(cls, type) and path not in self._patched:
                    self._patched[path] = _Patched(path, cls.__dict__)
        if self._has_versions:
            self._versions = [version_of(patched.attributes) for patched in self._patched.values()]

    def _look_at_cuda(self) -> Held:
        """Return settings and memory of CUDA."""
        device = cuda_device()
        held: Held = {("torch", name): value for name, value in cuda_settings().items()}
        self._has_used_own_gpu = self._has_used_own_gpu or device == self.own_gpu
        if self._has_used_own_gpu:
            held[CURRENT_GPU] = device
        return held

    def _look_at_groups(self) -> Held:
        """Return process groups but the default one; thousands stay where no test destroys any."""
        world = group_registry()
        if world is None:
            return {}
        default = world.default_pg
        seen = id(default), world.group_count, len(world.pg_names)
        if seen != self._groups_seen:
            self._groups_seen = seen
            self._groups = {
                ("groups", id(group)): group.size()
                for group in world.pg_names
                if group is not default
            }
        return self._groups

    def _look_at_megatron(self) -> Held:
        """Return what megatron-core keeps in its modules, None and empty ones left out."""
        held: Held = {}
        for variables, names in self._states:
            for name in names:
                value = variables.get(name)
                if value is None or callable(value):
                    continue
                if name == _BUFFER:
                    for key, tensor in list(getattr(value, "buffer", {}).items()):
                        size = tensor.numel() * tensor.element_size()
                        held["megatron", ("buffer", str(key))] = size
                else:
                    is_plain = isinstance(value, int | float | str)
                    module = str(variables["__name__"])
                    held["megatron", (module, name)] = value if is_plain else id(value)
        for name in getattr(_variable(_RANDOM, _TRACKER), "states_", ()):
            held["megatron", ("rng", name)] = True
        return held

    def list_directory(self) -> Held:
        """Return the files of the working directory, except hidden ones."""
        try:
            changed_ns = os.stat(self._directory).st_mtime_ns
            if changed_ns != self._changed_ns:
                self._changed_ns = changed_ns
                self._files = {
                    ("working-directory", f"{self._directory}{os.sep}{name}"): ""
                    for name in os.listdir(self._directory)
                    if not name.startswith((".", "__"))
                }
        except OSError:  # it was removed
            self._files = {}
        return self._files


def group_registry() -> _GroupRegistry | None:
    """Return the process groups that torch has; None before it is loaded."""
    world = _variable("torch.distributed.distributed_c10d", "_world")
    return cast("_GroupRegistry | None", world)


def _variable(module: str, name: str) -> object:
    """Return a variable of a loaded module, or None; modules may import what they lack."""
    return getattr(sys.modules.get(module), "__dict__", {}).get(name)


def _handlers_of_signals() -> Held:
    """Return the handlers of signals."""
    found = [(name, _get_handler(number)) for number, name in _SIGNALS]
    return {
        ("signals", name): handler
        for name, handler in found
        if handler is not _DEFAULT_HANDLER and not _is_of_torch(handler)
    }


def _running_threads() -> Held:
    return {("threads", thread.ident): thread.name for thread in threading.enumerate()}


def _filters() -> Held:
    return {("warnings", "filters"): list(warnings.filters)}


def _children() -> Held:
    """Return child processes, which are listed by the thread that started them.

    Those of threads that Python knows: NCCL and gloo have a thousand of their own where a suite
    destroys no groups, start no processes, and would take 50 ms after each test.
    """
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except OSError:  # there are none
        return {}
    found: list[int] = []
    threads = {thread.native_id for thread in threading.enumerate()}
    for thread in threads | {os.getpid()}:  # of the main one: in a forked process it has another
        try:
            with _open(f"/proc/self/task/{thread}/children") as file:
                found += map(int, file.read().split())
        except OSError:
            continue
    return {("processes", pid): "" for pid in found}


def is_connection(key: Key) -> bool:
    """Return whether a key is of a socket, a pipe, shared memory or an object of the kernel."""
    if key[0] != "files":
        return False
    try:
        path = os.readlink(f"/proc/self/fd/{key[1]}")
    except OSError:
        return True
    return path.startswith(_SHARED_MEMORY) or not path.startswith("/")


def _state_names(module: ModuleType) -> tuple[str, ...]:
    """Return the global variables in which a module of Megatron keeps its state.

    Of the parallel state those that `destroy_model_parallel` resets: others stay behind when it is
    destroyed, and do no harm.
    """
    code = getattr(vars(module).get("destroy_model_parallel"), "__code__", None)
    names = vars(module) if code is None else code.co_names
    return tuple(name for name in names if name[0] == "_" and name[1:2].isupper())


_Row: TypeAlias = tuple[object, object, object]


def _mib(size: int) -> str:
    return f"{size / _MIB:.1f} MiB"


def _groups(rows: Sequence[_Row]) -> list[str]:
    """Describe process groups that were left."""
    sizes = Counter(cast("int", value) for _, value, _ in rows)
    ranks = ", ".join(
        counted(size, "rank") if len(sizes) == 1 else f"{number} of {counted(size, 'rank')}"
        for size, number in sorted(sizes.items())
    )
    return [f"{counted(len(rows), 'process group')} ({ranks})"]


def _threads(rows: Sequence[_Row]) -> list[str]:
    """Describe threads that were left, but for those of libraries."""
    names = []
    threads = {thread.ident: thread for thread in threading.enumerate()}
    for ident, value, _ in rows:
        thread = threads.get(cast("int", ident))
        target = getattr(thread, "_target", None)
        places = (type(thread).__module__, str(getattr(target, "__module__", "")))
        is_of_library = any(place.startswith(_THREADS_OF_LIBRARIES) for place in places)
        if not is_of_library and not _is_of_inductor(thread):
            names.append(str(value))
    return [f"{counted(len(names), 'thread')} ({listed(names, _MOST_LISTED)})"] if names else []


def _is_of_inductor(thread: object) -> bool:
    """Return whether a thread is of the pool that Inductor compiles in."""
    compiler = _variable("torch._inductor.async_compile", "AsyncCompile")
    pool = getattr(compiler, "pool", None)
    if pool is None or not pool.cache_info().currsize:  # it has none
        return False
    executor, *_ = getattr(thread, "_args", None) or (None,)  # a weak reference
    return callable(executor) and executor() is pool()


def _open_files(rows: Sequence[_Row]) -> list[str]:
    """Describe files, sockets and pipes that were left open."""
    files: list[str] = []
    others: Counter[str] = Counter()
    found: dict[int, str] = {}
    for name, _, _ in rows:
        with suppress(OSError):  # of another thread, a moment ago
            found[int(str(name))] = os.readlink(f"/proc/self/fd/{name}")
    kept = _pipes_of_libraries(found)
    for number, path in found.items():
        kind = path.partition(":")[0]
        if path.startswith("/") and (
            path.startswith(_SHARED_MEMORY) or not path.startswith(_PLACES_OF_LIBRARIES)
        ):
            files.append(path)
        elif kind in ("pipe", "socket") and number not in kept:
            others[kind] += 1
    texts = [f"{counted(len(files), 'open file')} ({listed(sorted(files), _MOST_LISTED)})"]
    return texts[: len(files)] + [f"{counted(n, f'open {kind}')}" for kind, n in others.items()]


def _pipes_of_libraries(found: Mapping[int, str]) -> set[int]:
    """Return descriptors of pipes that libraries keep from their first use on.

    Those of Python's helper processes, and of libuv, which torch's stores use: it keeps both ends
    of a pipe and leaves one byte in it.

    Args:
        found: Descriptor -> what it refers to.
    """
    kept = {
        getattr(_variable(f"multiprocessing.{module}", f"_{module}"), name, None)
        for module, name in (("resource_tracker", "_fd"), ("forkserver", "_forkserver_alive_fd"))
    }
    both_ends = {path for path, number in Counter(found.values()).items() if number > 1}
    for path in both_ends:
        ends = sorted(number for number, other in found.items() if other == path)
        if path.startswith("pipe:") and _num_waiting(ends[0]) == 1:
            kept |= {*ends}
    return {number for number in kept if isinstance(number, int)}


def _num_waiting(pipe: int) -> int:
    """Return the number of bytes that nobody has read from a pipe yet."""
    found = fcntl.ioctl(pipe, termios.FIONREAD, bytes(4))
    return int.from_bytes(found, sys.byteorder)


def _processes(rows: Sequence[_Row]) -> list[str]:
    """Describe child processes that were left, but for those of libraries."""
    names = []
    for pid, _, _ in rows:
        try:
            with _open(f"/proc/{pid}/cmdline", "rb") as file:
                command = file.read().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue
        if not any(name in command for name in _PROCESSES_OF_LIBRARIES):
            names.append(command or f"{pid}, which nothing has waited for")
    what = counted(len(names), "child process", "child processes")
    return [f"{what} ({listed(names, _MOST_LISTED)})"] if names else []


def _variables(rows: Sequence[_Row]) -> list[str]:
    """Return names only, as values may be secret."""
    texts = []
    for name, value, was in rows:
        word = "unset" if value is None else "set" if was is None else "changed"
        texts.append(f"{os.fsdecode(cast('bytes', name))} {word}")
    return [f"environment: {listed(texts, _MOST_LISTED)}"]


def _handlers(rows: Sequence[_Row]) -> list[str]:
    """Describe signal handlers that were changed."""
    return [
        f"handler of {name}: {_handler(value)}, was {_handler(was)}" for name, value, was in rows
    ]


def _handler(value: object) -> str:
    """Name a signal handler."""
    if value is None:
        return "the default"
    if isinstance(value, int):
        return signal.Handlers(value).name
    return str(getattr(value, "__qualname__", value))


def _settings(rows: Sequence[_Row]) -> list[str]:
    """Describe settings that were changed, with their values if these are short."""
    return [
        f"{name} {value}, was {was}"
        if _is_short(value) and _is_short(was)
        else f"{name} changed{_differing(value, was)}"
        for name, value, was in rows
    ]


def _differing(value: object, was: object) -> str:
    """Return what only one of two collections has, in brackets, as far as that is text."""
    if not (isinstance(value, tuple | dict) and isinstance(was, tuple | dict)):
        return ""
    names = [str(x) for x in value if x not in was] + [str(x) for x in was if x not in value]
    shown = [name for name in dict.fromkeys(names) if not name.isdecimal()]
    return f" ({listed(shown, _MOST_LISTED)})" if shown else ""


def _is_short(value: object) -> bool:
    return not isinstance(value, tuple | dict) and len(str(value)) < _MOST_SHOWN


def _megatron_leaks(rows: Sequence[_Row]) -> list[str]:
    """Return the texts on what is left of Megatron-LM's state, by module."""
    found: dict[str, list[_Row]] = {}
    for key, value, was in rows:
        part, name = cast("tuple[str, str]", key)
        found.setdefault(part, []).append((name, value, was))
    names = {part: [str(name) for name, _, _ in rows] for part, rows in found.items()}
    texts = [
        f"{what} ({listed(names[module], _MOST_LISTED)})"
        for module, what in _STATE_MODULES.items()
        if module in names
    ]
    if "buffer" in found:
        size = sum(cast("int", value or 0) for _, value, _ in found["buffer"])
        texts.append(f"global memory buffer of megatron-core ({_mib(size)})")
    if "rng" in found:
        texts.append(f"RNG tracker states ({listed(names['rng'], _MOST_LISTED)})")
    return texts


_DESCRIBE: Mapping[str, Callable[[Sequence[_Row]], list[str]]] = {
    "groups": _groups,
    "threads": _threads,
    "files": _open_files,
    "processes": _processes,
    "environment": _variables,
    "signals": _handlers,
    "warnings": lambda _: ["other warnings filters"],
    "torch": _settings,
    "python": _settings,
    "megatron": _megatron_leaks,
    "patches": lambda rows: [f"patched {listed([str(name) for name, _, _ in rows], _MOST_LISTED)}"],
    "working-directory": lambda rows: [str(name) for name, _, _ in rows],
}
# A setting counts in whatever way it changed; of the others only what is there and was not.
SETTINGS = frozenset(("environment", "signals", "warnings", "torch", "python"))

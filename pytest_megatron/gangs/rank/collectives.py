"""Counter of the collectives of this process, and delays of them; runs in ranks only (effects).

Ranks have to agree on collectives, not on sends and receives: the last stage of a pipeline sends
less than the first one. gloo has one sequence number for both, so sends and receives are counted
here and subtracted.

Methods of groups and backends are wrapped, not functions of `torch.distributed`: all of those end
in a method, by whatever name a test has imported them. What torch calls from C++ is collective
(reducers, functional collectives), except for the sends and receives of compiled graphs: these are
operators, whose kernels for the CPU are wrapped.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Protocol, cast

from typing_extensions import override

from pytest_megatron.base.text import counted

_GLOO = "gloo"
_OPERATORS = "_c10d_functional"
_BATCH = "batch_p2p_ops"  # the operator of several
_SENT = {"isend": 1, "irecv": -1}  # operator -> what it adds to the sends less receives
_COUNTED = ("send", "recv", "recv_anysource", "monitored_barrier")


class _Group(Protocol):
    """Interface of a process group and of its backend."""

    def name(self) -> str: ...

    def size(self) -> int: ...

    def _get_backend(self, device: object) -> _Group: ...

    def _get_sequence_number_for_group(self) -> int: ...


class _Device(Protocol):
    type: str


class _SentTensor(Protocol):
    """Interface of a tensor."""

    device: _Device


@dataclass(frozen=True, slots=True, kw_only=True)
class DefaultGroup:
    """The default process group."""

    size: int
    backend: str

    @override
    def __str__(self) -> str:
        return f"{counted(self.size, 'rank')} ({self.backend})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Numbers of collectives and sends of this rank.

    Attributes:
        num_collectives: Those of the default group; -1 without one of all ranks, and for
            backends without comparable sequence numbers.
        num_rendezvous: Default groups that were set up.
        num_unmatched: Sends within the default group less receives. The sum over all ranks is 0,
            unless a send was never received.
    """

    num_collectives: int
    num_rendezvous: int
    num_unmatched: int = 0


class _Counter:
    """Counter of this process, from the import of torch.distributed on."""

    def __init__(self, torch: ModuleType, distributed: ModuleType) -> None:
        # Not `torch.distributed`, which is set at the end of its import.
        self._torch = torch
        self._distributed = distributed
        self._c10d = distributed.distributed_c10d
        self._lock = threading.Lock()
        self.num_rendezvous = 0
        self._group: weakref.ref[_Group] | None = None
        self._gloo: _Group | None = None
        self._num_others = 0  # sequence numbers of the default group that are no collectives
        self._num_unmatched = 0
        self._library: object = None  # kernels go with it

    def install(self) -> None:
        """Wrap the methods to count."""
        bindings = sys.modules["torch._C._distributed_c10d"]
        for cls in (bindings.ProcessGroup, bindings.Backend):
            self._wrap_methods(cls)
        self._wrap_rendezvous()
        self._wrap_operators_later()

    def _wrap_operators_later(self) -> None:
        """Wrap the operators of sends once there is a group, when torch has been imported whole."""
        original = getattr(self._c10d, "_register_process_group", None)
        if original is None:
            return

        def register(*args: object) -> object:
            """Register the first group, after wrapping torch's operators."""
            self._c10d._register_process_group = original  # for the first group
            with contextlib.suppress(AttributeError, RuntimeError):  # torch has others
                self._library = self._wrap_operators()
            return original(*args)

        self._c10d._register_process_group = register

    def _wrap_operators(self) -> object:
        """Count in kernels for the CPU, which call torch's own; return what keeps them.

        torch before 2.10 does not have these operators.
        """
        torch = self._torch
        operators = getattr(torch.ops, _OPERATORS)
        library = torch.library.Library(_OPERATORS, "IMPL")
        own = torch._C.DispatchKeySet(torch._C.DispatchKey.CompositeExplicitAutograd)

        def run(name: str, *args: object) -> object:
            """Run a collective's operator, and count it."""
            result = getattr(operators, name).default.redispatch(own, *args)
            if self._gloo_of(self._c10d._resolve_process_group(args[-1])) is not None:
                kinds = cast("Sequence[str]", args[0]) if name == _BATCH else [name]
                self._add(len(kinds), sum(_SENT[kind] for kind in kinds))
            return result

        for name in (*_SENT, _BATCH):
            if hasattr(operators, name):
                library.impl(name, functools.partial(run, name), "CPU")
        return library

    def _wrap_methods(self, cls: type) -> None:
        """Have the methods of a class of groups counted."""
        # pybind11 detects by the name of a function that an override calls its base.
        original = SimpleNamespace(**{name: getattr(cls, name) for name in _COUNTED})

        def send(self: object, *args: object, **settings: object) -> object:
            """Send, and count it."""
            work = original.send(self, *args, **settings)
            counter._take(self, args, settings, sent=1)
            return work

        def recv(self: object, *args: object, **settings: object) -> object:
            """Receive, and count it."""
            work = original.recv(self, *args, **settings)
            counter._take(self, args, settings, sent=-1)
            return work

        def recv_anysource(self: object, *args: object, **settings: object) -> object:
            """Receive from any rank, and count it."""
            work = original.recv_anysource(self, *args, **settings)
            counter._take(self, args, settings, sent=-1)
            return work

        def monitored_barrier(self: object, *args: object, **settings: object) -> object:
            """Run the barrier, and do not count it."""
            gloo = counter._gloo_of(self)
            before = 0 if gloo is None else gloo._get_sequence_number_for_group()
            try:
                return original.monitored_barrier(self, *args, **settings)
            finally:
                if gloo is not None:  # made of sends, more of them on rank 0
                    after = gloo._get_sequence_number_for_group()
                    counter._add(after - before - 1, 0)

        counter = self
        for method in (send, recv, recv_anysource, monitored_barrier):
            wrapped = getattr(cls, method.__name__)
            method.__doc__, method.__qualname__ = wrapped.__doc__, wrapped.__qualname__
            setattr(cls, method.__name__, method)

    def _wrap_rendezvous(self) -> None:
        """Give each default group that a test sets up its own prefix in the gang's store.

        Otherwise a group that follows a destroyed one may read addresses of the old one and hang:
        seen with torch 2.13 under plain `torch.distributed.run`.
        """
        rendezvous = sys.modules["torch.distributed.rendezvous"]
        original = getattr(rendezvous, "_create_c10d_store", None)
        prefixed = self._distributed.PrefixStore
        if original is None:
            return

        def create(*args: object, **settings: object) -> object:
            """Create a store whose keys no earlier rendezvous has used."""
            store = original(*args, **settings)
            self.num_rendezvous += 1
            return prefixed(f"rendezvous/{self.num_rendezvous}", store)

        vars(rendezvous)["_create_c10d_store"] = create

    def _take(
        self, group: object, args: Sequence[object], settings: dict[str, object], *, sent: int
    ) -> None:
        """Count a send or a receive of gloo, which handles memory of the CPU only."""
        tensors = cast("Sequence[_SentTensor]", args[0] if args else settings["tensors"])
        if tensors[0].device.type == "cpu" and self._gloo_of(group) is not None:
            self._add(1, sent)

    def _add(self, num_others: int, num_unmatched: int) -> None:
        """Add collectives, and sends without a receive, to the counts."""
        with self._lock:
            self._num_others += num_others
            self._num_unmatched += num_unmatched

    def _gloo_of(self, group: object) -> _Group | None:
        """Return the gloo backend if this is the default group or its backend."""
        default = self.find_default()
        return self._gloo if group is default or group is self._gloo else None

    def describe_default(self) -> DefaultGroup | None:
        """Return a description of the default group, or None."""
        default = self.find_default()
        if default is None:
            return None
        known = self._c10d._world.pg_map.get(default)
        return DefaultGroup(size=default.size(), backend=str(known[0]) if known else "")

    def find_default(self) -> _Group | None:
        """Return the default group, and reset the counts if it is a new one."""
        default = cast(
            "_Group | None", self._c10d._world.default_pg
        )  # tests patch public functions
        if default is None:
            self._gloo = None
        elif self._group is None or self._group() is not default:
            self._group = weakref.ref(default)
            self._gloo = self._find_gloo(default)
            self._num_others = self._num_unmatched = 0
        return default

    def _find_gloo(self, group: _Group) -> _Group | None:
        """Return the gloo backend of a group, None without one."""
        try:
            backend = group._get_backend(self._torch.device("cpu"))
            return backend if backend.name() == _GLOO else None
        except (AttributeError, RuntimeError):  # a group for GPUs alone, or of a test
            return None

    def counts(self, world_size: int) -> Counts:
        """Return the numbers so far."""
        default = self.find_default()
        if default is None or self._gloo is None or default.size() != world_size:
            return Counts(num_collectives=-1, num_rendezvous=self.num_rendezvous)
        number = self._gloo._get_sequence_number_for_group()
        return Counts(
            num_collectives=number - self._num_others,
            num_rendezvous=self.num_rendezvous,
            num_unmatched=self._num_unmatched,
        )


class _Finder(MetaPathFinder):
    """Import hook that finds no module, and waits for the import of torch.distributed."""

    def __init__(self, install: Callable[[], bool]) -> None:
        self._install = install

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.startswith("torch.") and self._install():
            sys.meta_path.remove(self)
        return None


def install_from_import_on(install: Callable[[], bool]) -> None:
    """Wrap torch.distributed in this process, now or when it is imported.

    Args:
        install: Returns False as long as it is not loaded.
    """
    if not install():
        sys.meta_path.insert(0, _Finder(install))


_counter: _Counter | None = None


def count_from_import_on() -> None:
    """Count in this process, from now on or from the import of torch.distributed on."""
    install_from_import_on(_install)


def count_collectives(world_size: int) -> Counts:
    """Return the counts of this rank so far.

    Args:
        world_size: World size of the gang.
    """
    if _counter is None:
        return Counts(num_collectives=-1, num_rendezvous=0)
    return _counter.counts(world_size)


def default_group() -> DefaultGroup | None:
    """Return a description of the default group, or None without one."""
    return None if _counter is None else _counter.describe_default()


def _install() -> bool:
    """Wrap torch if it is loaded; return whether it is."""
    global _counter  # noqa: PLW0603 - one process, one torch
    torch = sys.modules.get("torch")
    distributed = sys.modules.get("torch.distributed")
    # This name is defined last.
    if torch is None or distributed is None or not hasattr(distributed, "init_process_group"):
        return False
    if _counter is None:
        _counter = _Counter(torch, distributed)
        _counter.install()
    return True

"""State of a session before any import of the user's code, from which ranks start as well.

It also sets variables of ranks while tests are collected.
"""

from __future__ import annotations

import os
import random
import re
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest
from typing_extensions import override

from pytest_megatron.gangs.start import PACKAGE, RANK_VARIABLES, SIZE_VARIABLES, is_library
from pytest_megatron.session import options
from pytest_megatron.session.options import chosen_ini, has_workers

if TYPE_CHECKING:
    from pytest_megatron.gangs.ipc.messages import RankConfig
    from pytest_megatron.gangs.rank.bootstrap import RandomState
    from pytest_megatron.gangs.start.no_groups import NoGroups
    from pytest_megatron.gangs.start.preload import PreloadedProcess
    from pytest_megatron.gpu.host import Lease


_RANK_WORDS = re.compile(r"\b(?:[A-Z]+_)*(?:RANK|WORLD_SIZE|PROCID|LOCALID)\b")
_READERS = ("<frozen", os.__file__)  # `getenv`, `get`


class EnvWatch:
    """Sets variables, and records readers of those that differ between ranks.

    Attributes:
        rank_readers: `VARIABLE in file:line`, each place once.
        size_readers: The same for variables that are equal in gangs of one size.
    """

    def __init__(self, env: Mapping[str, str], on_rank_read: Callable[[], None]) -> None:
        """Create a watch; nothing is set yet.

        Args:
            env: Variables to set, also over existing ones.
            on_rank_read: Called when a variable of RANK_VARIABLES is read for the first time.
        """
        self._env = dict(env)
        self._on_rank_read = on_rank_read
        self._before: dict[str, str | None] | None = None
        self.rank_readers: list[str] = []
        self.size_readers: list[str] = []

    def start(self, *, is_noting: bool = True) -> None:
        """Set the variables; a second call does nothing."""
        if self._before is not None:
            return
        self._before = {name: os.environ.get(name) for name in self._env}
        os.environ.update(self._env)
        if is_noting:
            os.environ.__class__ = _watched(self._note)

    def stop(self) -> None:
        """Restore the variables, except those that other code has set meanwhile."""
        if self._before is None:
            return
        os.environ.__class__ = os._Environ  # its class has no other name
        for name, value in self._before.items():
            if os.environ.get(name) != self._env[name]:
                continue
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        self._before = None

    def _note(self, name: str, place: str) -> None:
        """Note a place that reads the rank or the world size."""
        readers = self.rank_readers if name in RANK_VARIABLES else self.size_readers
        text = f"{name} in {place}"
        if text in readers:
            return
        readers.append(text)
        if readers is self.rank_readers and len(readers) == 1:
            self._on_rank_read()


def find_rank_words(modules: Iterable[ModuleType], root: Path) -> str:
    """Return the first rank variable that a project's modules name, with its place, or "".

    Args:
        modules: Those that are loaded.
        root: Root of the project; libraries below it are left out.
    """
    for module in modules:
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or not file.endswith(".py") or is_library(file):
            continue
        try:
            text = Path(file).read_text(errors="replace") if Path(file).is_relative_to(root) else ""
        except OSError:  # it was removed after it was loaded
            continue
        if (found := _RANK_WORDS.search(text)) is not None:
            return f"{found[0]} in {file}:{text.count(chr(10), 0, found.start()) + 1}"
    return ""


def _watched(note: Callable[[str, str], None]) -> type:
    """Return a class for `os.environ` that reports reads by name.

    Copies of the whole environment are no reads: those list the keys first, then get each.
    """
    names = RANK_VARIABLES | SIZE_VARIABLES
    iterated: list[str] = []  # the current key of a loop over the items
    copying: Iterator[str] = iter(())  # the keys that a copy still has to get

    class WatchedEnviron(os._Environ[str]):
        @override
        def __getitem__(self, key: str) -> str:
            nonlocal copying
            if key not in iterated and next(copying, None) != key:
                copying = iter(())
                if key in names:
                    _record_read(note, key)
            return str(super().__getitem__(key))

        @override
        def __iter__(self) -> Iterator[str]:
            nonlocal copying
            keys = list(super().__iter__())
            try:
                for key in keys:
                    iterated[:] = [key]
                    yield key
            finally:
                iterated.clear()
            copying = iter(keys)

    return WatchedEnviron


def _record_read(note: Callable[[str, str], None], name: str) -> None:
    """Record a read, unless this package or the standard library made it."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_READERS):
        frame = frame.f_back
    file = frame.f_code.co_filename
    if not file.startswith(PACKAGE):
        note(name, f"{file}:{frame.f_lineno}")


PLUGIN_NAME = "megatron-start-environment"


@dataclass(slots=True)
class StartEnvironment:
    """Process state at the start of a session.

    Attributes:
        watch: None in a session without options for gangs.
        preloaded: The process that ranks which collect for themselves are forked from, if any.
        size: Ranks of a node, and nodes, as typed; None without options for gangs.
        reader: Where the source reads the rank while it is collected, as found before; "" if not.
        is_collecting: Whether ranks begin to collect beside the controller, with the session.
        lease: Devices of ranks that have begun before conftest files are loaded, until it is taken.
        begun: Configurations of such ranks, until they are taken or ended.
    """

    env: Mapping[str, str]
    path: list[str]
    argv: list[str]
    random_state: RandomState
    watch: EnvWatch | None = None
    preloaded: PreloadedProcess | None = None
    size: tuple[int, int] | None = None
    reader: str = ""
    is_collecting: bool = False
    lease: Lease | None = None
    begun: Sequence[RankConfig] = ()

    def stop_preloaded(self) -> None:
        """End the process that imported ahead, unless it was taken."""
        if self.preloaded is not None:
            self.preloaded.stop(has_ranks=False)
            self.preloaded = None
        if self.lease is not None:
            self.lease.close()
            self.lease = None

    def forget_unless(self, size: tuple[int, int] | None) -> None:
        """Forget gangs of another size, which an option of somebody else was taken to ask for."""
        if self.watch is not None and self.size != size:
            self.watch.stop()
            self.stop_preloaded()
            self.size = self.watch = None
            self.is_collecting, self.reader = False, ""


KEY = pytest.StashKey[StartEnvironment]()


class StartEnvironmentPlugin:
    """Sets the variables of rank 0 while tests are collected, and has no groups set up."""

    def __init__(self, watch: EnvWatch, no_groups: NoGroups) -> None:
        self._watch = watch
        self._no_groups = no_groups

    @pytest.hookimpl(trylast=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Restore the variables before pytest-xdist starts its workers, which collect."""
        config = session.config
        if has_workers(config) and not hasattr(config, "workerinput"):
            self._watch.stop()
            self._no_groups.stop()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtestloop(self) -> Generator[None, object, object]:
        """Restore the variables before any test runs."""
        self._watch.stop()
        self._no_groups.stop()
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self) -> Generator[None, object, object]:
        """Set the variables of rank 0 again for hooks of a project."""
        self._no_groups.let_destroy_nothing()
        if self._watch.rank_readers:
            self._watch.start(is_noting=False)
        return (yield)


def record_start_environment(early_config: pytest.Config) -> None:
    """Record the start environment; with options for gangs, watch reads of rank variables."""
    start_env = StartEnvironment(
        env=dict(os.environ),
        path=list(sys.path),
        argv=list(sys.argv),
        random_state=random.getstate(),
    )
    early_config.stash[KEY] = start_env
    size = start_env.size = options.early_size(early_config)
    if size is None:
        return
    from pytest_megatron.gangs.rank.bootstrap import rank_env  # noqa: PLC0415 - not for all
    from pytest_megatron.gangs.start.no_groups import NoGroups  # noqa: PLC0415 - not for all
    from pytest_megatron.gangs.start.preload import start_preloaded  # noqa: PLC0415 - not for all
    from pytest_megatron.gangs.start.rank_readers import find_reader  # noqa: PLC0415 - not for all
    from pytest_megatron.gangs.topology import Nodes  # noqa: PLC0415 - not for all
    from pytest_megatron.process.fork_safety import HARMLESS_ENV  # noqa: PLC0415 - not for all

    def preload() -> None:
        """Start the process that imports ahead of collection."""
        modules = options.early_words(early_config, "preload")
        start_env.preloaded = start_preloaded(start_env.env, start_env.path, modules)
        early_config.add_cleanup(start_env.stop_preloaded)

    def on_rank_read() -> None:
        if may_collect and start_env.preloaded is None:
            preload()

    given = early_config.known_args_namespace
    start = chosen_ini(early_config, "megatron_gang_start") or "auto"
    may_collect = start != "fork" and not (given.collectonly or _is_for_others(early_config))
    per_node, num_nodes = size
    world_size = per_node * num_nodes
    nodes = Nodes(num_nodes=num_nodes, ranks_per_node=per_node)
    env = rank_env(nodes.place(world_size)[0], world_size)
    harmless = {name: value for name, value in HARMLESS_ENV.items() if name not in os.environ}
    may_begin = may_collect and num_nodes == 1 and "PYTEST_XDIST_WORKER" not in os.environ
    if start == "auto" and may_begin:
        start_env.reader = find_reader(early_config)
    watch = start_env.watch = EnvWatch({**env, **harmless}, on_rank_read)
    watch.start()
    early_config.add_cleanup(watch.stop)
    no_groups = NoGroups()
    no_groups.start()
    early_config.add_cleanup(no_groups.stop)
    if may_collect and (start == "collect" or start_env.reader) and start_env.preloaded is None:
        preload()
        start_env.is_collecting = may_begin
    early_config.pluginmanager.register(StartEnvironmentPlugin(watch, no_groups), PLUGIN_NAME)


def refuse_launcher(config: pytest.Config, num_nodes: int) -> None:
    """Refuse a session that a launcher started several times, as each would run everything.

    Sessions that a test starts are accepted, whatever launched that test.

    Raises:
        pytest.UsageError: A launcher started several sessions.
    """
    env = config.stash[KEY].env
    if "PYTEST_CURRENT_TEST" in env:
        return
    started = num_started(env)
    if started is not None and started[1] > num_nodes:
        launcher, number = started
        raise pytest.UsageError(
            f"{launcher} started {number} sessions of pytest, and each of them would start ranks "
            f"and run everything; start pytest once, without {launcher}, or drop --ranks and --gpus"
        )


def num_started(env: Mapping[str, str]) -> tuple[str, int] | None:
    """Return the launcher of a process and its number of processes; None without a known launcher.

    Slurm's numbers are not used: the shell of `srun --ntasks=8 --pty` is one of 8 tasks, and the
    only one that runs. For steps over several nodes, see `gangs.topology`.
    """
    counts = [("mpirun", env.get("OMPI_COMM_WORLD_SIZE"))]
    if "TORCHELASTIC_RUN_ID" in env:
        counts.insert(0, ("torchrun", env.get("WORLD_SIZE")))
    found = ((name, int(count)) for name, count in counts if count and count.isdecimal())
    return next(found, None)


def _is_for_others(early_config: pytest.Config) -> bool:
    """Return whether this process only distributes tests to workers of pytest-xdist."""
    given = early_config.known_args_namespace
    is_xdist = bool(getattr(given, "numprocesses", None) or getattr(given, "tx", None))
    return is_xdist and "PYTEST_XDIST_WORKER" not in os.environ

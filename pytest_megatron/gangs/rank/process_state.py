"""State of a rank that tests must restore; runs in ranks only (effects).

A test that leaves another default group, working directory or `open` behind passes, and all later
ones of its rank fail. So the state is checked after each test: it is restored where possible, a
gang with another default group is replaced, and a warning names the test.
"""

from __future__ import annotations

import builtins
import errno
import resource
import signal
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias, cast

from pytest_megatron.gangs.rank.audit import (
    CURRENT_GPU,
    LIMIT_OF_FILES,
    SETTINGS,
    Leak,
    LeakAudit,
    group_registry,
    is_connection,
)
from pytest_megatron.gangs.rank.collectives import DefaultGroup, default_group
from pytest_megatron.gangs.rank.logs import STANDARD, RankLogs
from pytest_megatron.gangs.rank.settings import Held, Key
from pytest_megatron.process.originals import os

_ENVIRON, _DIRECTORY, _OPEN, _GROUP = "os.environ", "directory", "builtins.open", "group"
_TIMER = "timer"
_MOST_BYTES = 8192
_STOPS = sum(1 << (n - 1) for n in (signal.SIGSTOP, signal.SIGTSTP))  # in a mask of /proc
_KILLS = 1 << (signal.SIGKILL - 1)
_MOST_S = 10.0
_MORE_DESCRIPTORS = 64
_environ = os.environ
_environb = os.environb
_variables = cast("Mapping[bytes, bytes]", vars(os.environ)["_data"])  # a tenth as long to read
# Name -> value; variables have their own names, and None if they are not set. Keys of the audit are
# pairs.
State: TypeAlias = dict[str | Key, object]


@dataclass(slots=True)
class StateKeeper:
    """Expected state after the running test.

    Attributes:
        world_size: World size of the gang.
        logs: Standard streams of the rank.
        temp: Returns the directory in which tests make theirs.
        audit: Probes of what else tests leave, which is reported and not restored; None without.
        variables: Names of those that this rank was given.
        group_maker: Test in which the default group was made; "" if there is none.
    """

    world_size: int
    logs: RankLogs
    temp: Callable[[], Path | None]
    audit: LeakAudit | None = None
    variables: Iterable[str] = ()
    group_maker: str = ""
    _last_group: object = None
    _raw: dict[str, bytes] = field(default_factory=dict)
    _expected: State = field(default_factory=dict)
    _initial: State = field(default_factory=dict)
    _sizes: dict[str, int] = field(default_factory=dict)
    _replaced: dict[Hashable, State] = field(default_factory=dict)
    _makers: dict[str | Key, str] = field(default_factory=dict)
    _held: Held | None = None  # what is expected; None if that has changed since

    def __post_init__(self) -> None:
        self._raw = {name: name.encode() for name in self.variables}
        self._expected, self._sizes = self.look()
        self._initial = dict(self._expected)
        if self.audit is not None:
            self._initial[CURRENT_GPU] = self.audit.own_gpu

    def look(self) -> tuple[State, dict[str, int]]:
        """Return the state of this process, and bytes of memory that it has, by kind."""
        state = self._look()
        if self.audit is None:
            return state, {}
        state.update(self.audit.look())
        return state, self.audit.sizes()

    def _look(self) -> State:
        """Return what is restored; takes some microseconds."""
        try:
            directory = os.getcwd()
        except OSError:  # it was removed
            directory = None
        state: State = {name: _variables.get(raw) for name, raw in self._raw.items()}
        state[_ENVIRON] = sys.modules["os"].environ
        state[_DIRECTORY] = directory
        state[_OPEN] = builtins.open
        state[_GROUP] = default_group()
        is_armed = signal.getitimer(signal.ITIMER_REAL)[0] > 0
        state[_TIMER] = is_armed or self._expected.get(_TIMER, False)
        state.update(_streams())
        return state

    def begin(self) -> None:
        """Expect files that other ranks made in the test before, after the look of this one."""
        if self.audit is not None:
            self._expected.update(self.audit.list_directory())

    def accept(self, fixture: Hashable, name: str, before: tuple[State, Mapping[str, int]]) -> None:
        """Expect from now on the changes of a fixture with a wider scope than a test.

        Args:
            fixture: The fixture, which was just set up.
            name: Name of the fixture.
            before: The state before its set-up.
        """
        state, sizes = self.look()
        changed = _differences(state, before[0])
        self._held = None
        if changed:
            self._replaced[fixture] = {key: self._expected.get(key) for key in changed}
            _update(self._expected, changed)
            for key in changed:
                self._makers.setdefault(key, name)
        for kind, size in sizes.items():
            grown = size - before[1].get(kind, size)
            self._sizes[kind] = self._sizes.get(kind, size - grown) + grown

    def release(self, fixture: Hashable) -> None:
        """Expect the state before a fixture again, as it is torn down."""
        replaced = self._replaced.pop(fixture, None)
        if replaced:
            self._held = None
            _update(self._expected, replaced)

    def restore(self, test: str) -> tuple[list[str], str]:
        """Restore the state that the test has changed.

        Any test may destroy the default group, and create one of all ranks if there is none.

        Args:
            test: Node id of the test.

        Returns:
            The changes, and a problem with the default group, or "".
        """
        state, expected = self._look(), self._expected
        wrong_group = self._judge_group(state, expected)
        registry = group_registry()
        group = None if registry is None else registry.default_pg
        if group is not self._last_group:
            self._last_group, self.group_maker = group, "" if group is None else test
        expected[_GROUP] = state[_GROUP]
        changed = [
            str(name)
            for name, value in state.items()
            if value is not expected[name] and value != expected[name]  # os.environ compares slowly
        ]
        found = [
            self._put_back(name, state[name], expected[name])
            for name in changed
            if name not in self._raw
        ]
        variables = [name for name in changed if name in self._raw]
        for name in variables:
            _set_variable(name, expected[name])
        if variables:
            left = ", ".join(f"{name} {_shown(state[name])}" for name in variables)
            found.append(f"it left {left}, put back")
        if changed:
            expected.update(_streams())
        temp = self.temp()
        if temp is not None and not _exists(temp):
            os.makedirs(temp, mode=0o700, exist_ok=True)
            found.append("it removed the directory for temporary files, which was made again")
        return found, wrong_group

    def find_lack_of_descriptors(self) -> str:
        """Return what is wrong if the test has used up all descriptors, or "".

        What is done after the test may have some more then.
        """
        try:
            os.close(os.dup(2))
        except OSError as error:
            if error.errno != errno.EMFILE:
                return ""
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            more = soft + _MORE_DESCRIPTORS if hard < 0 else min(soft + _MORE_DESCRIPTORS, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (more, hard))
            self._expected[LIMIT_OF_FILES] = more
            return f"it left none of {soft} descriptors free"
        return ""

    def find_leaks(self) -> list[Leak]:
        """Return what the test left behind beside the restored state, and expect it from now on.

        A search that fails at what a test has patched finds nothing, and does not fail the test.
        """
        if self.audit is None:
            return []
        try:
            return self._search(self.audit)
        except Exception:  # noqa: BLE001 - such as of a thread or a handler of another class
            return []

    def _search(self, audit: LeakAudit) -> list[Leak]:
        """Return what the test left, after garbage had time to go."""
        held = audit.look()
        sizes = audit.sizes()
        suspects = [] if held is self._held else self._new(held)
        leaks = audit.find_size_leaks(self._sizes, sizes)
        is_connecting = audit.is_connecting()
        if suspects or leaks:
            audit.settle({key[0] for key in suspects} | {leak.kind for leak in leaks})
            held, sizes = audit.look(), audit.sizes()
            found = self._new(held)
            if is_connecting:
                found = [key for key in found if not is_connection(key)]
            leaks = audit.describe(
                (key, held.get(key), self._expected.get(key), self._makers.get(key, ""))
                for key in found
            ) + audit.find_size_leaks(self._sizes, sizes)
            for replaced in self._replaced.values():  # the end of a fixture does not name it again
                for key in found:
                    replaced.pop(key, None)
        if held is not self._held:
            self._expected = {k: v for k, v in self._expected.items() if isinstance(k, str)}
            self._expected.update(held)
            self._held = held
        self._sizes = sizes
        return leaks

    def _new(self, held: Held) -> list[Key]:
        """Return what is held and was not, and settings that changed and not back."""
        expected, initial = self._expected, self._initial
        new = [key for key, value in held.items() if expected.get(key) != value]
        if new:  # a library that the test has loaded brings its settings
            kinds = ("torch", "python")
            initial |= {k: held[k] for k in new if k[0] in kinds and k not in initial}
        lost = [
            key
            for key in expected.keys() - held.keys()
            if not isinstance(key, str) and key[0] in SETTINGS
        ]
        return [
            key for key in new + lost if key[0] not in SETTINGS or held.get(key) != initial.get(key)
        ]

    def _put_back(self, name: str, value: object, wanted: object) -> str:
        """Undo a change, and return its description."""
        match name:
            case "os.environ":
                vars(sys.modules["os"])["environ"] = wanted
                return "it replaced os.environ, which was put back"
            case "builtins.open":
                vars(builtins)["open"] = wanted
                return "it replaced builtins.open, which was put back"
            case "directory":
                return _go_back(value, wanted)
            case "timer":
                signal.setitimer(signal.ITIMER_REAL, 0)
                return "it left an alarm set, which was stopped"
            case _:
                self.logs.reopen(name)
                return f"it closed or replaced {name}, which was opened anew"

    def _judge_group(self, state: State, expected: State) -> str:
        """Return why the default group fits no later test, "" if it does."""
        group = cast("DefaultGroup | None", state[_GROUP])
        wanted = cast("DefaultGroup | None", expected[_GROUP])
        if group is None or group == wanted or (wanted is None and group.size == self.world_size):
            return ""
        wanted = wanted or DefaultGroup(size=self.world_size, backend="any backend")
        return f"it left a default process group of {group} in the place of {wanted}"


def continue_parent() -> bool:
    """Continue the process that starts ranks, and return true, if a test has stopped it.

    One that a test has killed takes this rank with it, before the test has passed.
    """
    parent = os.getppid()
    try:
        descriptor = os.open(f"/proc/{parent}/status", os.O_RDONLY)
    except OSError:  # it is gone, or there is no descriptor left
        return False
    try:
        lines = os.read(descriptor, _MOST_BYTES).split(b"\n")
    finally:
        os.close(descriptor)
    found = dict(line.split(b":\t", 1) for line in lines if line.startswith((b"State", b"ShdPnd")))
    pending = int(found.get(b"ShdPnd", b"0"), 16)
    if pending & _KILLS:
        time.sleep(_MOST_S)
    if pending & _STOPS or found.get(b"State", b"").startswith(b"T "):
        os.kill(parent, signal.SIGCONT)
        return True
    return False


def _differences(state: State, before: State) -> State:
    """Return values that differ; None for those that are gone."""
    changed = {
        key: value
        for key, value in state.items()
        if before.get(key) is not value and before.get(key) != value
    }
    return changed | dict.fromkeys(before.keys() - state.keys())


def _update(state: State, changes: State) -> None:
    """Change values; a pair with None is removed."""
    for key, value in changes.items():
        if value is None and not isinstance(key, str):
            state.pop(key, None)
        else:
            state[key] = value


def _set_variable(name: str, value: object) -> None:
    """Set a variable back, or remove it."""
    if value is None:
        _environ.pop(name, None)
    else:
        assert isinstance(value, bytes)
        _environb[name.encode()] = value


def _go_back(directory: object, wanted: object) -> str:
    """Change to the wanted directory; return what the test had left."""
    left = f"it left the working directory {directory}"
    if directory is None:
        left = "it removed the working directory"
    try:
        os.chdir(str(wanted))
    except OSError as error:
        return f"{left}, and there is no way back to {wanted}: {error.strerror}"
    return f"{left}, put back to {wanted}"


def _streams() -> State:
    """Return each standard stream of Python that is open, and the file of its descriptor."""
    found: State = {}
    for number, name in enumerate(STANDARD):
        stream = vars(sys)[name]
        try:
            status = os.fstat(number)
        except OSError:
            found[name] = None
        else:
            is_closed = getattr(stream, "closed", False)
            found[name] = (None if is_closed else stream, status.st_dev, status.st_ino)
    return found


def _shown(value: object) -> str:
    return repr(os.fsdecode(value)) if isinstance(value, bytes) else "unset"


def _exists(path: Path) -> bool:
    """Return whether a path is there, by functions that tests have not patched."""
    try:
        os.stat(path)
    except OSError:
        return False
    return True

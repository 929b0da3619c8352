"""State of a rank that tests must restore; runs in ranks only (effects).

A test that leaves another default group, working directory or `open` behind passes, and all later
ones of its rank fail. So the state is checked after each test: it is restored where possible, a
gang with another default group is replaced, and a warning names the test.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias, cast

from pytest_megatron.gang.originals import os
from pytest_megatron.gang.rank.collectives import DefaultGroup, default_group

_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
_ENVIRON, _DIRECTORY, _OPEN, _GROUP = "os.environ", "directory", "builtins.open", "group"
_environ = os.environ
_raw = {name: name.encode() for name in _VARIABLES}
_environb = os.environb  # half as long to read
# Name -> value; variables have their own names, and None if they are not set.
State: TypeAlias = dict[str, object]


def look() -> State:
    """Return the state of this process; takes some microseconds."""
    try:
        directory = os.getcwd()
    except OSError:  # it was removed
        directory = None
    state: State = {name: _environb.get(raw) for name, raw in _raw.items()}
    state[_ENVIRON] = sys.modules["os"].environ
    state[_DIRECTORY] = directory
    state[_OPEN] = builtins.open
    state[_GROUP] = default_group()
    return state


@dataclass(slots=True)
class StateKeeper:
    """Expected state after the running test.

    Attributes:
        world_size: Of the gang.
        temp: Returns the directory in which tests make theirs.
    """

    world_size: int
    temp: Callable[[], Path | None]
    _expected: State = field(default_factory=look)
    _replaced: dict[Hashable, State] = field(default_factory=dict)

    def accept(self, fixture: Hashable, before: State) -> None:
        """Expect from now on the changes of a fixture with a wider scope than a test.

        Args:
            fixture: The fixture, which was just set up.
            before: The state before its set-up.
        """
        changed = {name: value for name, value in look().items() if value != before[name]}
        if changed:
            self._replaced[fixture] = {name: self._expected[name] for name in changed}
            self._expected.update(changed)

    def release(self, fixture: Hashable) -> None:
        """Expect the state before such a fixture again, as it is torn down."""
        self._expected.update(self._replaced.pop(fixture, {}))

    def restore(self) -> tuple[list[str], str]:
        """Restore the state that the test has changed.

        Any test may destroy the default group, and create one of all ranks if there is none.

        Returns:
            The changes, and a problem with the default group, or "".
        """
        state, expected = look(), self._expected
        wrong_group = self._judge_group(state, expected)
        expected[_GROUP] = state[_GROUP]
        found = []
        if state != expected:
            found = [
                _put_back(name, state[name], wanted)
                for name, wanted in expected.items()
                if state[name] != wanted
            ]
        temp = self.temp()
        if temp is not None and not _exists(temp):
            os.makedirs(temp, mode=0o700, exist_ok=True)
            found.append("it removed the directory for temporary files, which was made again")
        return found, wrong_group

    def _judge_group(self, state: State, expected: State) -> str:
        group = cast("DefaultGroup | None", state[_GROUP])
        wanted = cast("DefaultGroup | None", expected[_GROUP])
        if group is None or group == wanted or (wanted is None and group.size == self.world_size):
            return ""
        wanted = wanted or DefaultGroup(size=self.world_size, backend="any backend")
        return f"it left a default process group of {group} in the place of {wanted}"


def _put_back(name: str, value: object, wanted: object) -> str:
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
        case _ if wanted is None:
            _environ.pop(name, None)
        case _:
            assert isinstance(wanted, bytes)
            _environb[_raw[name]] = wanted
    return f"it left {name} {_shown(value)}, put back to {_shown(wanted)}"


def _go_back(directory: object, wanted: object) -> str:
    left = f"it left the working directory {directory}"
    if directory is None:
        left = "it removed the working directory"
    try:
        os.chdir(str(wanted))
    except OSError as error:
        return f"{left}, and there is no way back to {wanted}: {error.strerror}"
    return f"{left}, put back to {wanted}"


def _shown(value: object) -> str:
    return repr(os.fsdecode(value)) if isinstance(value, bytes) else "unset"


def _exists(path: Path) -> bool:
    try:
        os.stat(path)
    except OSError:
        return False
    return True

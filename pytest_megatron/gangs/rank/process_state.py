"""State of a rank that tests must restore; runs in ranks only (effects).

A test that leaves another default group or working directory behind passes, and all later ones of
its rank fail. So the state is checked after each test: it is restored where possible, a
gang with another default group is replaced, and a warning names the test.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias, cast

from pytest_megatron.gangs.rank.collectives import DefaultGroup, default_group
from pytest_megatron.gangs.rank.logs import STANDARD, RankLogs
from pytest_megatron.process.originals import os

_ENVIRON, _DIRECTORY, _GROUP = "os.environ", "directory", "group"
_environ = os.environ
_environb = os.environb
_variables = cast("Mapping[bytes, bytes]", vars(os.environ)["_data"])  # a tenth as long to read
# Name -> value; variables have their own names, and None if they are not set.
State: TypeAlias = dict[str, object]


@dataclass(slots=True)
class StateKeeper:
    """Expected state after the running test.

    Attributes:
        world_size: World size of the gang.
        logs: Standard streams of the rank.
        variables: Names of those that this rank was given.
    """

    world_size: int
    logs: RankLogs
    variables: Iterable[str] = ()
    _raw: dict[str, bytes] = field(default_factory=dict)
    _expected: State = field(default_factory=dict)
    _replaced: dict[Hashable, State] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._raw = {name: name.encode() for name in self.variables}
        self._expected = self.look()

    def look(self) -> State:
        """Return what is restored; takes some microseconds."""
        try:
            directory = os.getcwd()
        except OSError:  # it was removed
            directory = None
        state: State = {name: _variables.get(raw) for name, raw in self._raw.items()}
        state[_ENVIRON] = sys.modules["os"].environ
        state[_DIRECTORY] = directory
        state[_GROUP] = default_group()
        state.update(_streams())
        return state

    def accept(self, fixture: Hashable, before: State) -> None:
        """Expect from now on the changes of a fixture with a wider scope than a test.

        Args:
            fixture: The fixture, which was just set up.
            before: The state before its set-up.
        """
        state = self.look()
        changed = {
            key: value
            for key, value in state.items()
            if before[key] is not value and before[key] != value
        }
        if changed:
            self._replaced[fixture] = {key: self._expected[key] for key in changed}
            self._expected.update(changed)

    def release(self, fixture: Hashable) -> None:
        """Expect the state before a fixture again, as it is torn down."""
        self._expected.update(self._replaced.pop(fixture, {}))

    def restore(self) -> tuple[list[str], str]:
        """Restore the state that the test has changed.

        Any test may destroy the default group, and create one of all ranks if there is none.

        Returns:
            The changes, and a problem with the default group, or "".
        """
        state, expected = self.look(), self._expected
        wrong_group = self._judge_group(state, expected)
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
        return found, wrong_group

    def _put_back(self, name: str, value: object, wanted: object) -> str:
        """Undo a change, and return its description."""
        match name:
            case "os.environ":
                vars(sys.modules["os"])["environ"] = wanted
                return "it replaced os.environ, which was put back"
            case "directory":
                return _go_back(value, wanted)
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

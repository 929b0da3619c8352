"""The table of rooms, and what they add to one another.

A room is a folder of one feature with a module `room.py`, which says what it adds: commands, and
answers to the extension points of others. A room of the ring can be deleted with its name here, its
tests and its pages. Imports the standard library alone: every start of pytest reads it.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar, cast

ROOMS = (
    *("gangs", "workloads", "triage"),
    *(
        "ci",
        "demo",
        "doctor",
        "engines",
        "flaky",
        "layouts",
        "leaks",
        "pages",
        "repro",
        "trace",
        "watch",
    ),
)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Room:
    """What one room adds.

    Attributes:
        commands: Subcommand of `pytest-megatron` to `module:function` and a line of help.
        provides: Name of an extension point to `module:attribute`; modules are those of the room.
    """

    commands: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    provides: Mapping[str, str] = field(default_factory=dict)


def rooms() -> Iterator[tuple[str, Room]]:
    """Yield the name of each room and what it adds, in the order of the table."""
    for name in ROOMS:
        room: Room = importlib.import_module(f"{__package__}.{name}.room").ROOM
        yield name, room


def load(target: str) -> object:
    """Return what there is at `room.module:attribute`, below the package."""
    module, _, attribute = target.partition(":")
    return cast("object", getattr(importlib.import_module(f"{__package__}.{module}"), attribute))


@dataclass(frozen=True, slots=True)
class ExtensionPoint(Generic[T]):
    """A place where rooms add something; the module that asks declares it, with its type.

    Attributes:
        name: The key in `Room.provides`.
    """

    name: str

    def all(self) -> list[T]:
        """Return what rooms add here, in the order of the table."""
        found = ((name, room.provides.get(self.name)) for name, room in rooms())
        return [cast("T", load(f"{name}.{target}")) for name, target in found if target is not None]

    def first(self) -> T | None:
        """Return the only addition, or None where its room is not there."""
        return next(iter(self.all()), None)

"""The room `gangs` in the table."""

from __future__ import annotations

from pytest_megatron.rooms import Room

ROOM = Room(
    commands={
        "gangs": ("command:gangs", "List, stop and use the processes that --keep-gangs keeps."),
    },
)

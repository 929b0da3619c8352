"""The room `gangs` in the table."""

from __future__ import annotations

from pytest_megatron.rooms import Room

ROOM = Room(
    commands={
        "gangs": ("command:gangs", "List and stop the processes that --keep-gangs keeps."),
        "watch": ("command:watch", "Run tests, and again after each edit, on kept gangs."),
    },
)

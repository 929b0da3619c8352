"""The room `repro` in the table."""

from __future__ import annotations

from pytest_megatron.rooms import Room

ROOM = Room(
    commands={
        "repro": ("command:command", "Do a failing item of a run or artifact again, here."),
    },
)

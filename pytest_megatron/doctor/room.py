"""The room `doctor` in the table."""

from __future__ import annotations

from pytest_megatron.rooms import Room

ROOM = Room(
    commands={
        "doctor": ("command:command", "Check this machine and environment."),
    },
)

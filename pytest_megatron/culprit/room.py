"""The room `culprit` in the table."""

from __future__ import annotations

from pytest_megatron.rooms import Room

ROOM = Room(
    commands={
        "culprit": ("command:command", "Find the commit from which on an item fails."),
    },
)

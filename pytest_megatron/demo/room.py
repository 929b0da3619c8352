"""The room `demo` in the table."""

from __future__ import annotations

from pytest_megatron.rooms import Room

ROOM = Room(
    commands={
        "demo": ("command:command", "Write a small project into an empty directory, and run it."),
    },
)

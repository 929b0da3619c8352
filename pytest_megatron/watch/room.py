"""The room `watch` in the table."""

from __future__ import annotations

from pytest_megatron.rooms import Room

ROOM = Room(
    commands={
        "watch": (
            "command:command",
            "Run pytest now and after each edit, with torch loaded.",
        ),
    },
)

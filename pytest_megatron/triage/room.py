"""The room `triage` in the table."""

from __future__ import annotations

from pytest_megatron.rooms import Room

ROOM = Room(
    commands={
        "triage": ("command:command", "Find why a run failed, from its logs."),
    },
)

"""The room `trace` in the table."""

from __future__ import annotations

from pytest_megatron.rooms import Room

ROOM = Room(
    commands={
        "trace": ("command:command", "Compare traces of tensors."),
    },
    provides={"trace_tools": "bits:TOOLS"},
)

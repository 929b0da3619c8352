"""The room `changed` in the table."""

from __future__ import annotations

from pytest_megatron.rooms import Room

ROOM = Room(
    provides={name: f"hooks:{name}" for name in ("begin", "configure", "collected", "selected")}
)

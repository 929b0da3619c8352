"""The room `changed` in the table."""

from __future__ import annotations

from pytest_megatron.rooms import Room

ROOM = Room(
    commands={
        "changed": ("command:changed", "Join records of what tests use, for --changed."),
    },
    provides={
        **{name: f"hooks:{name}" for name in ("begin", "configure", "collected", "selected")},
        "plan.replay": "command:print_replay",
        "plan.unaffected": "select:unaffected_since",
    },
)

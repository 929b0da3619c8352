"""The room `pages` in the table."""

from __future__ import annotations

from pytest_megatron.rooms import Room

ROOM = Room(
    commands={
        "report": ("command:report", "Write pages and pictures of finished runs."),
        "runs": ("command:runs", "List and remove the runs that a project keeps."),
    },
)

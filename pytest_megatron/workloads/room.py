"""The room `workloads` in the table."""

from __future__ import annotations

from pytest_megatron.rooms import Room

ROOM = Room(
    commands={
        "golden": ("commands.golden:command", "Compare observed metrics with golden values."),
        "lint": ("commands.recipes:lint", "Report errors in recipes, cases and goldens."),
    },
)

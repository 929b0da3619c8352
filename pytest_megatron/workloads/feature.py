"""The feature `workloads` in the table."""

from __future__ import annotations

from pytest_megatron.features import Feature

FEATURE = Feature(
    commands={
        "expand": ("commands.recipes:expand", "Print the workloads that recipe files expand to."),
        "golden": ("commands.golden:command", "Compare observed metrics with golden values."),
        "lint": ("commands.recipes:lint", "Report errors in recipes, cases and goldens."),
        "record": (
            "commands.record:command",
            "Record a row and its golden from a command line.",
        ),
    },
)

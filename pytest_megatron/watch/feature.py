"""The feature `watch` in the table."""

from __future__ import annotations

from pytest_megatron.features import Feature

FEATURE = Feature(
    commands={
        "watch": (
            "command:command",
            "Run pytest now and after each edit, with torch loaded.",
        ),
    },
)

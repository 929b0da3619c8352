"""The feature `demo` in the table."""

from __future__ import annotations

from pytest_megatron.features import Feature

FEATURE = Feature(
    commands={
        "demo": ("command:command", "Write a small project into an empty directory, and run it."),
    },
)

"""The feature `doctor` in the table."""

from __future__ import annotations

from pytest_megatron.features import Feature

FEATURE = Feature(
    commands={
        "doctor": ("command:command", "Check this machine and environment."),
    },
)

"""The feature `triage` in the table."""

from __future__ import annotations

from pytest_megatron.features import Feature

FEATURE = Feature(
    commands={
        "triage": ("command:command", "Find why a run failed, from its logs."),
    },
)

"""The feature `repro` in the table."""

from __future__ import annotations

from pytest_megatron.features import Feature

FEATURE = Feature(
    commands={
        "repro": ("command:command", "Do a failing item of a run or artifact again, here."),
    },
)

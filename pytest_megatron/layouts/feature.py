"""The feature `layouts` in the table."""

from __future__ import annotations

from pytest_megatron.features import Feature

FEATURE = Feature(
    commands={
        "layout": ("command:command", "Run single ranks of a program without GPUs, compare them."),
    },
    provides={
        "fake_training": "plugin:FakeTrainingPlugin",
        "fake_ranks": "model:read_ranks",
        "item_section": "report:section",
    },
)

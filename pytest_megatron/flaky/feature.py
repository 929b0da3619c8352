"""The feature `flaky` in the table."""

from __future__ import annotations

from pytest_megatron.features import Feature

FEATURE = Feature(
    commands={
        "flaky": ("command:command", "Count how often items passed only when run again."),
    },
    provides={name: f"hooks:{name}" for name in ("has_worker", "selected")},
)

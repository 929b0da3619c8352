"""The feature `trace` in the table."""

from __future__ import annotations

from pytest_megatron.features import Feature

FEATURE = Feature(
    commands={
        "trace": ("command:command", "Compare traces of tensors."),
    },
    provides={"trace_tools": "bits:TOOLS"},
)

"""The feature `ci` in the table."""

from __future__ import annotations

from pytest_megatron.features import Feature

FEATURE = Feature(
    commands={
        "ci": ("command:command", "Write files for CI, and make one verdict of many jobs."),
        "plan": ("plan_command:command", "Print the CI jobs for labels and an event."),
    },
    provides={
        "begin": "hooks:begin",
        "configure": "hooks:configure",
        "decide": "decide:decide_for",
    },
)

"""The feature `pages` in the table."""

from __future__ import annotations

from pytest_megatron.features import Feature

FEATURE = Feature(
    commands={
        "runs": ("command:runs", "List and remove runs, and write their pages."),
    },
    provides={
        "pages": "write:write_report",
        "reporter": "plugin:register_pages",
    },
)

"""The feature `leaks` in the table."""

from __future__ import annotations

from pytest_megatron.features import Feature

FEATURE = Feature(
    provides={"rank_plugin": "plugin:LeakPlugin"},
)

"""Quarantine in a session; each function loads the rest if there is something to do."""

from __future__ import annotations

import pytest

from pytest_megatron.gangs.markers import is_quarantined_by_us
from pytest_megatron.session.options import WORKLOADS_PLUGIN, has_own_items, is_rank, read_options


def has_worker(config: pytest.Config) -> None:
    """Register the plugin in the controller of pytest-xdist, whose workers report to it."""
    from pytest_megatron.flaky.plugin import register_quarantine

    register_quarantine(config)


def selected(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Find the items in quarantine, where a mark or a plugin of ours is in the session."""
    manager = config.pluginmanager
    if is_rank(config) or config.option.collectonly:
        return
    if has_own_items(config) or any(map(is_quarantined_by_us, items)):
        from pytest_megatron.flaky.plugin import quarantine_items

        is_writing = (
            manager.has_plugin(WORKLOADS_PLUGIN) and read_options(config).is_writing_goldens
        )
        quarantine_items(config, items, has_own_items=has_own_items(config), is_writing=is_writing)

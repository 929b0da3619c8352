"""`--changed` and `--record-changed` in a session; each function loads the rest if asked to."""

from __future__ import annotations

import pytest

from pytest_megatron.session.options import chosen_ini, dest, given, is_rank, read_options


def _is_asked_for(config: pytest.Config) -> bool:
    """Return true if what tests use is recorded, or decides which of them run."""
    return any(given(config, name) is not None for name in ("changed", "record-changed"))


def _is_asked_for_early(early_config: pytest.Config) -> bool:
    """Return the same before conftest files are loaded."""
    given = vars(early_config.known_args_namespace)
    names = [dest(name) for name in ("changed", "record-changed")]
    return any(given.get(n) is not None or chosen_ini(early_config, n) is not None for n in names)


def begin(early_config: pytest.Config, _: list[str]) -> None:
    """Begin to record before conftest files are loaded."""
    if _is_asked_for_early(early_config):
        from pytest_megatron.changed.plugin import begin_early

        begin_early(early_config, is_rank=is_rank(early_config))


def configure(config: pytest.Config) -> None:
    """Register the plugins that record and select tests by what changed."""
    if _is_asked_for(config):
        from pytest_megatron.changed.plugin import register_changed

        register_changed(config, read_options(config), is_rank=is_rank(config))


def collected(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Count the tests of each file."""
    if _is_asked_for(config):
        from pytest_megatron.changed.plugin import count_collected

        count_collected(config, items)


def selected(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests for which nothing changed."""
    if _is_asked_for(config):
        from pytest_megatron.changed.plugin import leave_out_unchanged

        leave_out_unchanged(config, items)

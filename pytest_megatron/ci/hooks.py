"""Buckets and marks of python tests in a session; each function loads the rest if asked to."""

from __future__ import annotations

import pytest

from pytest_megatron.session.options import (
    early_words,
    given,
    read_options,
    typed,
)

_ALSO_ABOUT_UNITS = ("environment", "platform", "tag", "labels", "ci-event")


def may_ask_for_units(config: pytest.Config) -> bool:
    """Return true if an option is given that leaves out python tests by file or by mark.

    Words that also choose among workloads have to be typed: their default in an ini file must not
    leave out tests of a plain pytest.
    """
    is_theirs = any(given(config, name) is not None for name in ("bucket", "experimental-tests"))
    return is_theirs or any(typed(config, name) is not None for name in _ALSO_ABOUT_UNITS)


def begin(early_config: pytest.Config, args: list[str]) -> None:
    """Have pytest start in the folders of `--bucket`."""
    words = early_words(early_config, "bucket")
    if words:
        from pytest_megatron.ci.test_selection import add_folders

        add_folders(early_config, args, words)


def configure(config: pytest.Config) -> None:
    """Register the plugin that leaves out tests by file or by mark."""
    if may_ask_for_units(config):
        from pytest_megatron.ci.test_selection import register_units

        register_units(config, read_options(config))

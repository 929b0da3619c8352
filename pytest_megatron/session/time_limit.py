"""The time limit of tests on ranks, which pytest-timeout may set as well."""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest

from pytest_megatron.session.options import Options, chosen_ini, seconds_of

NO_LIMIT = " (0 is no limit)"
_TIMEOUT_PLUGINS = ("timeout", "pytest_timeout")  # the second one if `-p` loads it


@dataclass(frozen=True, slots=True)
class TimeLimit:
    """Time limit of a phase.

    Attributes:
        seconds: 0 is no limit.
        is_of_call: Whether it limits the call alone.
    """

    seconds: float
    is_of_call: bool = False


def limit_of_session(config: pytest.Config, options: Options) -> TimeLimit:
    """Return the limit of tests without a marker.

    `--rank-timeout` wins, then settings of pytest-timeout, then the default.

    Raises:
        pytest.UsageError: It is no time.
    """
    if "rank-timeout" not in options.given and has_timeout_plugin(config):
        settings: dict[str, object] = {
            "--timeout": config.getoption("timeout", None),
            "PYTEST_TIMEOUT": os.environ.get("PYTEST_TIMEOUT"),
            "timeout in the ini file": chosen_ini(config, "timeout"),
        }
        for source, value in settings.items():
            if value not in (None, ""):
                return TimeLimit(seconds_of(value, source, NO_LIMIT), is_of_call(config))
    return TimeLimit(options.rank_timeout_s)


def is_of_call(config: pytest.Config) -> bool:
    """Return true if pytest-timeout is set to limit calls alone."""
    return has_timeout_plugin(config) and chosen_ini(config, "timeout_func_only") is True


def has_timeout_plugin(config: pytest.Config) -> bool:
    """Return true if pytest-timeout is in the session."""
    return any(map(config.pluginmanager.has_plugin, _TIMEOUT_PLUGINS))

"""Pytest's capturing of log records in a rank, without taking hold of every logger anew.

Since pytest 9.1 each phase of a test attaches two handlers to every logger that does not propagate
and detaches them again. With torch loaded there are some forty of those, and the six rounds of a
test cost as much as the rest of pytest. Here the handlers stay, and count between phases only.

Source: pytest 9.2, _pytest/logging.py, LoggingPlugin._runtest_for() and catching_logs.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Generator

import pytest
from _pytest.logging import (
    LogCaptureHandler,
    LoggingPlugin,
    caplog_handler_key,
    caplog_records_key,
    catching_logs,
)

_SILENT = 1 << 30  # above the level of any record


class KeptHandlers:
    """Does for the phases of tests what pytest's logging plugin does, with the same effect."""

    def __init__(self, plugin: LoggingPlugin) -> None:
        self._handlers: tuple[LogCaptureHandler, LogCaptureHandler] = (
            plugin.caplog_handler,
            plugin.report_handler,
        )
        self._level = plugin.log_level
        self._held: list[logging.Logger] = []
        self._levels = [handler.level for handler in self._handlers]

    @contextlib.contextmanager
    def catch(self, item: pytest.Item, when: str) -> Generator[None]:
        """Catch records in one phase of a test."""
        caplog, report = self._handlers
        root = logging.getLogger()
        self._hold()
        level = root.level
        if self._level is not None:
            self._levels = [self._level, self._level]
            if self._level < level:
                root.setLevel(self._level)
        caplog.level, report.level = self._levels
        caplog.reset()
        report.reset()
        item.stash[caplog_records_key][when] = caplog.records
        item.stash[caplog_handler_key] = caplog
        try:
            yield
        finally:
            item.add_report_section(when, "log", report.stream.getvalue().strip())
            self._levels = [caplog.level, report.level]
            caplog.level = report.level = _SILENT
            if root.level != level and self._level is not None:
                root.setLevel(level)

    def _hold(self) -> None:
        """Have both handlers last in every logger that pytest would attach them to."""
        wanted = _ends_of_chains()
        if wanted != self._held:
            for logger in set(self._held).difference(wanted):
                self._detach(logger)
            self._held = wanted
        caplog, report = self._handlers
        for logger in wanted:
            handlers = logger.handlers
            if len(handlers) < 2 or handlers[-1] is not report or handlers[-2] is not caplog:  # noqa: PLR2004 - both
                self._detach(logger)
                logger.addHandler(caplog)
                logger.addHandler(report)

    def _detach(self, logger: logging.Logger) -> None:
        for handler in self._handlers:
            logger.removeHandler(handler)


def keep_handlers(config: pytest.Config) -> None:
    """Make catching log records cheap, where pytest's own way is not."""
    plugin = config.pluginmanager.get_plugin("logging-plugin")
    if isinstance(plugin, LoggingPlugin) and "attached_loggers" in catching_logs.__slots__:
        plugin._runtest_for = KeptHandlers(plugin).catch  # type: ignore[method-assign]  # noqa: SLF001 - see above


def _ends_of_chains() -> list[logging.Logger]:
    """Return the root logger, and those whose records do not reach it."""
    root = logging.getLogger()
    return [root] + [
        logger
        for logger in root.manager.loggerDict.values()
        if isinstance(logger, logging.Logger) and not logger.propagate and logger is not root
    ]

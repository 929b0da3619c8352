"""Calls of pytest's hooks about tests as plain data, to be repeated in another process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import pytest
from _pytest.reports import BaseReport

from pytest_megatron.base.files import JsonValue
from pytest_megatron.base.text import cut_middle
from pytest_megatron.gang.ipc.messages import Mirrored
from pytest_megatron.hooks.gangs.reports import record_warning, restore_report

_MOST_CHARS = 1 << 24  # of one text in a report, which repeats the text of a failure
_LOGS = ("pytest_runtest_logstart", "pytest_runtest_logfinish")


def mirror_log(hook: str, nodeid: str, location: tuple[str, int | None, str]) -> Mirrored:
    """Return the start or the end of a test, for `replay`."""
    return Mirrored(hook=hook, data={"nodeid": nodeid, "location": list(location)})


def serialise(config: pytest.Config, report: pytest.TestReport) -> dict[str, JsonValue]:
    """Return a report as data for JSON."""
    found = config.hook.pytest_report_to_serializable(config=config, report=report)
    return cast("dict[str, JsonValue]", _plain(found))


def replay(config: pytest.Config, mirrored: Mirrored) -> None:
    """Repeat a call of a hook in this process."""
    data = dict(mirrored.data)
    if mirrored.hook in _LOGS:
        location = tuple(cast("list[JsonValue]", data["location"]))
        getattr(config.hook, mirrored.hook)(nodeid=data["nodeid"], location=location)
    elif mirrored.hook == "pytest_runtest_logreport":
        report: BaseReport = restore_report(config, data)
        config.hook.pytest_runtest_logreport(report=report)
    else:
        record_warning(config, data)


def describe_warning(
    message: object, when: str, nodeid: str, location: tuple[str, int, str] | None
) -> dict[str, JsonValue]:
    """Return a warning as data, for `record_warning`."""
    category = getattr(message, "category", Warning)
    return {
        "text": str(getattr(message, "message", "")),
        "module": category.__module__,
        "category": category.__qualname__,
        "filename": str(getattr(message, "filename", "")),
        "lineno": int(getattr(message, "lineno", 0)),
        "when": when,
        "nodeid": str(nodeid),
        "location": list(location) if location else None,
    }


def _plain(value: object) -> object:
    """Return a value for JSON: other objects as text, and huge texts cut."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return cut_middle(value if isinstance(value, str) else str(value), _MOST_CHARS)

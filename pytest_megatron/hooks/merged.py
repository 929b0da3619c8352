"""From merged reports to pytest's: built in the controller, for every plugin to see."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Literal, cast

import pytest
from _pytest._code.code import (
    ExceptionChainRepr,
    ExceptionRepr,
    ReprEntryNative,
    ReprFileLocation,
    ReprTraceback,
)
from _pytest.reports import BaseReport

from pytest_megatron.files import JsonValue
from pytest_megatron.gang.spec import RunEnd
from pytest_megatron.report.merge import Merged


def build_report(item: pytest.Item, merged: Merged) -> pytest.TestReport:
    """Return pytest's report of a phase, or of a subtest."""
    if merged.base is not None:
        report = _from_base(item, merged)
    else:
        report = pytest.TestReport(
            nodeid=item.nodeid,
            location=item.location,
            keywords=dict.fromkeys(item.keywords, 1),
            outcome=merged.outcome,
            longrepr=None,
            when=cast("Literal['setup', 'call', 'teardown']", merged.when),
        )
        if merged.outcome == "failed":
            report.longrepr = _crash(item, merged)
    report.outcome = merged.outcome
    report.duration = max(0.0, merged.stop - merged.start)
    report.start, report.stop = merged.start, merged.stop
    if not report.start:  # no rank could say when
        report.stop = time.time()
        report.start = report.stop - report.duration
    report.sections = [(name, text) for name, text in merged.sections]
    report.user_properties = [(name, value) for name, value in merged.properties]
    if merged.ranks:
        report.gang = {"ranks": dict(merged.ranks)}  # type: ignore[attr-defined]
    return report


def warn_again(config: pytest.Config, end: RunEnd) -> None:
    """Record the warnings of a test, equal ones of several ranks once."""
    seen: set[tuple[str, ...]] = set()
    for rank in end.ranks:
        for found in () if rank.done is None else rank.done.warnings:
            data = cast("dict[str, JsonValue]", found)
            key = tuple(str(data[name]) for name in ("text", "category", "filename", "lineno"))
            if key not in seen:
                seen.add(key)
                record_warning(config, data)


def record_warning(config: pytest.Config, data: Mapping[str, JsonValue]) -> None:
    """Record a warning that a rank described."""
    message = warnings.WarningMessage(
        message=_category(data)(str(data["text"])),
        category=_category(data),
        filename=str(data["filename"]),
        lineno=cast("int", data["lineno"]),
    )
    config.hook.pytest_warning_recorded.call_historic(
        kwargs={
            "warning_message": message,
            "when": data["when"],
            "nodeid": data["nodeid"],
            "location": tuple(cast("list[str]", data["location"])) if data["location"] else None,
        }
    )


def _category(data: Mapping[str, JsonValue]) -> type[Warning]:
    """Return the class of a warning where Python or pytest has it, else one of the same name."""
    name = str(data["category"])
    module = {"builtins": __builtins__, "pytest": vars(pytest)}.get(str(data["module"]))
    found = module.get(name) if isinstance(module, dict) else None
    if isinstance(found, type) and issubclass(found, Warning):
        return found
    return type(name, (UserWarning,), {"__module__": str(data["module"])})


def restore_report(config: pytest.Config, data: Mapping[str, object]) -> pytest.TestReport:
    """Return the report that pytest serialised, after a way through JSON."""
    found = config.hook.pytest_report_from_serializable(
        config=config, data=_with_tuples(dict(data))
    )
    assert isinstance(found, BaseReport)
    return cast("pytest.TestReport", found)


def _from_base(item: pytest.Item, merged: Merged) -> pytest.TestReport:
    place = {"nodeid": item.nodeid, "location": item.location}
    report = restore_report(item.config, {**(merged.base or {}), **place})
    if merged.outcome == "failed" and merged.blocks:
        longrepr = report.longrepr
        crash = getattr(longrepr, "reprcrash", None)
        if crash is not None and merged.message:
            crash.message = merged.message
        if isinstance(longrepr, ExceptionRepr):
            for title, text in merged.blocks:
                longrepr.addsection(title, text)
        else:
            report.longrepr = "\n".join([str(longrepr), "", *_block_lines(merged.blocks)])
    return report


def _with_tuples(data: dict[str, object]) -> dict[str, object]:
    """Undo what JSON did to tuples that pytest wants back."""
    for name in ("longrepr", "location"):
        if isinstance(value := data.get(name), list):
            data[name] = tuple(value)
    for name in ("sections", "user_properties"):
        if isinstance(value := data.get(name), list):
            data[name] = [tuple(pair) for pair in value]
    return data


def _crash(item: pytest.Item, merged: Merged) -> ExceptionChainRepr:
    """Return a failure that no rank could report itself, in the shape of a traceback."""
    path, line, _ = item.location
    place = ReprFileLocation(path=str(path), lineno=(line or 0) + 1, message=merged.message)
    entry = ReprEntryNative([f"{merged.message}\n"])
    shown = ReprTraceback(reprentries=[entry], extraline=None, style="native")
    longrepr = ExceptionChainRepr([(shown, place, None)])
    for title, text in merged.blocks:
        longrepr.addsection(title, text)
    return longrepr


def _block_lines(blocks: Sequence[tuple[str, str]]) -> list[str]:
    return [line for title, text in blocks for line in (f"-- {title} --", text)]

"""Conversion of merged reports to pytest's, in the controller, for all plugins."""

from __future__ import annotations

import builtins
import contextlib
import copy
import os
import sys
import time
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
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
from _pytest.unittest import TestCaseFunction
from typing_extensions import override

from pytest_megatron.base.files import JsonValue
from pytest_megatron.base.text import cut_middle, said_by, without_colours
from pytest_megatron.gangs.merge import LOGS, Merged, RunEnd

_MOST_CHARS = 1 << 24  # of one text in a report, which repeats the text of a failure
_MOST_DEEP = 50
_KEYWORDS = pytest.StashKey[dict[str, Literal[1]]]()


def build_report(item: pytest.Item, merged: Merged) -> pytest.TestReport:
    """Return pytest's report of a phase, or of a subtest."""
    if merged.blocks:
        merged = _shorten_paths(merged, str(item.config.invocation_params.dir))
    if merged.base is not None:
        report = _from_base(item, merged)
    else:
        report = pytest.TestReport(
            nodeid=item.nodeid,
            location=item.location,
            keywords=_keywords(item),
            outcome=merged.outcome,
            longrepr=None,
            when=cast("Literal['setup', 'call', 'teardown']", merged.when),
        )
        if merged.outcome == "failed":
            report.longrepr = _crash(item, merged)
    report.outcome = merged.outcome
    report.duration = max(0.0, merged.stop - merged.start)
    report.start, report.stop = merged.start, merged.stop
    if not report.start:  # no rank reported a time
        report.stop = time.time()
        report.start = report.stop - report.duration
    report.sections = [(name, text) for name, text in merged.sections]
    report.user_properties = [(name, value) for name, value in merged.properties]
    if merged.ranks:
        vars(report)["gang"] = {"ranks": dict(merged.ranks)}
    return report


def _keywords(item: pytest.Item) -> dict[str, Literal[1]]:
    """Return the keywords of an item for reports; computed once for all of its phases."""
    if _KEYWORDS not in item.stash:
        keywords: dict[str, Literal[1]] = dict.fromkeys(item.keywords, 1)
        item.stash[_KEYWORDS] = keywords
    return item.stash[_KEYWORDS].copy()


def excinfo_of(merged: Merged) -> pytest.ExceptionInfo[BaseException]:
    """Return the exception of a rank in a failed phase, rebuilt from its name and text.

    Plugins read these, to rerun some failures and not others.
    """
    name, text = _raised(merged)
    known = getattr(builtins, name, None)
    error: Exception = type(name, (Exception,), {})(text)
    if isinstance(known, type) and issubclass(known, Exception):
        with contextlib.suppress(TypeError):  # a group takes more than a text
            error = known.__new__(known, text)
    frame = sys._getframe()  # the exception was raised in another process
    traceback = TracebackType(None, frame, frame.f_lasti, frame.f_lineno)
    return pytest.ExceptionInfo.from_exc_info((type(error), error, traceback))


def count_failed_subtest(item: pytest.Item) -> None:
    """Count a failed subtest, so that pytest fails its test as the `subtests` fixture does."""
    counts = failed_subtests(item.config)
    if counts is not None and not isinstance(item, TestCaseFunction):  # which has no counts
        counts[getattr(item, "id", item.nodeid)] += 1  # a plain node id before pytest 9.1


def failed_subtests(config: pytest.Config) -> dict[object, int] | None:
    """Return pytest's counts of failed subtests, or None before pytest 9."""
    module = sys.modules.get("_pytest.subtests")
    return None if module is None else config.stash[module.failed_subtests_key]


def merge_problem(problem: str) -> Merged:
    """Return an error in the teardown of a test that was already reported."""
    message = problem.strip().splitlines()[-1] if "\n" in problem else problem
    merged = Merged(when="teardown", outcome="failed", message=message)
    if message != problem:
        merged = replace(merged, blocks=(("the last teardown", problem),))
    return merged


def warn_again(config: pytest.Config, end: RunEnd) -> None:
    """Record the warnings of a test, equal ones of several ranks once."""
    seen: set[tuple[str, ...]] = set()
    for rank in end.ranks:
        for found in () if rank.done is None else rank.done.warnings:
            data = cast("dict[str, JsonValue]", found)
            key = tuple(str(data[name]) for name in ("text", "category", "filename", "lineno"))
            if key not in seen:
                seen.add(key)
                _record_warning(config, data)


def _record_warning(config: pytest.Config, data: Mapping[str, JsonValue]) -> None:
    """Record a warning that a rank described, by a class of the same name."""
    name, module = str(data["category"]), str(data["module"])
    category: type[Warning] = type(name, (Warning,), {"__module__": module})
    message = warnings.WarningMessage(
        message=category(str(data["text"])),
        category=category,
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


def _shorten_paths(merged: Merged, directory: str) -> Merged:
    """Return the report with paths relative to the user's directory, and no empty log."""
    found = ((title, _written(text) if title == LOGS else text) for title, text in merged.blocks)
    blocks = [
        (title, text.replace(f"{directory}{os.sep}", ""))
        for title, text in found
        if text or title != LOGS
    ]
    return replace(merged, blocks=tuple(blocks))


def _written(files: str) -> str:
    """Return the files that hold something, a line each; those of other hosts stay."""
    paths = map(Path, files.splitlines())
    return "\n".join(str(path) for path in paths if not path.exists() or path.stat().st_size)


def _restore_report(config: pytest.Config, data: Mapping[str, object]) -> pytest.TestReport:
    """Return a report from pytest's serialisation, after JSON."""
    found = config.hook.pytest_report_from_serializable(
        config=config, data=_with_tuples(dict(data))
    )
    assert isinstance(found, BaseReport)
    report = cast("pytest.TestReport", found)
    _restore_context(report, data)
    return report


def _from_base(item: pytest.Item, merged: Merged) -> pytest.TestReport:
    """Return a merged report, made from that of one rank."""
    place = {"nodeid": item.nodeid, "location": item.location, "when": merged.when}
    base = copy.deepcopy(dict(merged.base or {}))  # pytest makes objects of what is inside
    report = _restore_report(item.config, {**base, **place})
    if merged.outcome == "failed" and merged.blocks:
        longrepr = report.longrepr
        crash = getattr(longrepr, "reprcrash", None)
        if crash is not None and merged.message:
            crash.message = merged.headline
        if isinstance(longrepr, ExceptionRepr):
            if isinstance(longrepr, ExceptionChainRepr):
                report.longrepr = longrepr = _PlainWhenText(longrepr.chain)
            for title, text in merged.blocks:
                longrepr.addsection(title, text)
        else:
            shown = merged.headline if isinstance(longrepr, tuple) else str(longrepr)  # a skip
            blocks = [f"-- {title} --\n{text}" for title, text in merged.blocks]
            report.longrepr = "\n".join([shown, "", *blocks])
    return report


class _PlainWhenText(ExceptionChainRepr):
    """A failure whose text, as JUnit XML takes it, has no colours of a compared value."""

    @override
    def __str__(self) -> str:
        return without_colours(super().__str__())


def _restore_context(report: pytest.TestReport, data: Mapping[str, object]) -> None:
    """Restore parameters of a subtest, of which pytest takes the repr again when it reads them."""
    context = data.get("_subtest.context")
    if isinstance(context, Mapping):
        object.__setattr__(report.context, "kwargs", context["kwargs"])  # it is frozen


def _raised(merged: Merged) -> tuple[str, str]:
    """Return name and text of the exception of a failed phase."""
    longrepr = (merged.base or {}).get("longrepr")
    place = longrepr.get("reprcrash") if isinstance(longrepr, dict) else None
    message = str(place.get("message", "")) if isinstance(place, dict) else merged.message
    head, colon, rest = message.partition(": ")
    name = head.rpartition(".")[2]
    if colon and name.isidentifier():
        return name, rest
    if message.isidentifier():
        return message, ""
    return ("AssertionError" if place else "RankFailure"), message


def _with_tuples(data: dict[str, object]) -> dict[str, object]:
    """Restore tuples that JSON turned into lists."""
    for name in ("longrepr", "location"):
        if isinstance(value := data.get(name), list):
            data[name] = tuple(value)
    for name in ("sections", "user_properties"):
        if isinstance(value := data.get(name), list):
            data[name] = [tuple(pair) for pair in value]
    return data


def _crash(item: pytest.Item, merged: Merged) -> ExceptionChainRepr:
    """Return a failure that no rank reported itself, in the form of a traceback."""
    path, line, _ = item.location
    place = ReprFileLocation(path=str(path), lineno=(line or 0) + 1, message=merged.headline)
    entry = ReprEntryNative([f"{merged.headline}\n"])
    shown = ReprTraceback(reprentries=[entry], extraline=None, style="native")
    longrepr = ExceptionChainRepr([(shown, place, None)])
    for title, text in merged.blocks:
        longrepr.addsection(title, text)
    return longrepr


def serialise(config: pytest.Config, report: BaseReport) -> dict[str, JsonValue]:
    """Return a report as data for JSON."""
    found = config.hook.pytest_report_to_serializable(config=config, report=report)
    return cast("dict[str, JsonValue]", _plain(found))


def describe_warning(
    message: object, when: str, nodeid: str, location: tuple[str, int, str] | None
) -> dict[str, JsonValue]:
    """Return a warning as data, for `warn_again`."""
    category = getattr(message, "category", Warning)
    return {
        "text": said_by(getattr(message, "message", "")),
        "module": category.__module__,
        "category": category.__qualname__,
        "filename": str(getattr(message, "filename", "")),
        "lineno": int(getattr(message, "lineno", 0)),
        "when": when,
        "nodeid": str(nodeid),
        "location": list(location) if location else None,
    }


def _plain(value: object, depth: int = 0) -> object:
    """Return a value for JSON: other objects as text, and huge texts cut."""
    if depth < _MOST_DEEP:  # else it may hold itself
        if isinstance(value, Mapping):
            return {said_by(k): _plain(v, depth + 1) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [_plain(v, depth + 1) for v in value]
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return cut_middle(said_by(value), _MOST_CHARS)

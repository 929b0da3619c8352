"""Texts about ranks that sent no report: stacks, and records of NCCL's flight recorder. Pure."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import TypeAlias, cast

from pytest_megatron.base.files import JsonValue, parse_json

_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<name>.+)$')
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen")
_PYTESTS = re.compile(r"/(?:_pytest|pluggy)/")
_PACKAGE = Path(__file__).parents[1]
_PARTS = "|".join(sorted(path.stem for path in _PACKAGE.iterdir()))  # a checkout has tests as well
_OURS = re.compile(rf"{_PYTESTS.pattern}|/{_PACKAGE.name}/(?:{_PARTS})(?:/|\.py\")")
_IDLE_THREAD = r"(?m)^(?:Current thread|Thread)[^\n]*\n  \.\.\.\n*"  # a thread of this package
_CRASHED = re.compile(r"Current thread [^\n]*\n(?:  [^\n]*(?:\n|$))+")
_MOST_LISTED = 3
_Record: TypeAlias = "dict[str, list[dict[str, JsonValue]]]"


def innermost_frame(stack: str) -> str | None:
    """Return `test_moe.py:14 in test_dispatch`, the deepest own frame of the main thread.

    Args:
        stack: Text of faulthandler, most recent call first.
    """
    frames = _called_frames(stack)
    own = [m for m in frames if not _is_of_library(m)]
    chosen = (own or frames)[:1]
    if not chosen:
        return None
    return f"{Path(chosen[0]['file']).name}:{chosen[0]['line']} in {chosen[0]['name']}"


def _called_frames(stack: str) -> list[re.Match[str]]:
    """Return the frames of the main thread that pytest called, without ours, innermost first."""
    main_thread = re.split(r"(?m)^(?:Current thread|Thread) .*$", stack)[-1]  # the last one
    frames = [m for line in main_thread.splitlines() if (m := _FRAME.match(line))]
    # Below the first frame of pytest is the program that started it.
    called = list(takewhile(lambda m: _PYTESTS.search(m[0]) is None, frames))
    return [m for m in called or frames if not _OURS.search(m[0])]


def _is_of_library(frame: re.Match[str]) -> bool:
    """Return whether a frame is of the standard library or of an installed package."""
    return any(part in frame["file"] for part in _LIBRARIES)


def crash_stack(log: str) -> str:
    """Return the stack that faulthandler wrote last, of the thread that crashed; "" without one."""
    _, _, dumped = log.rpartition("Fatal Python error: ")
    found = _CRASHED.search(dumped)
    return "" if found is None else found[0]


def shorten_stack(stack: str) -> str:
    """Return a stack without the frames of pytest, which are the same for every test."""
    kept: list[str] = []
    is_ours = False
    for line in stack.splitlines():
        if not line.startswith("  File"):
            is_ours = False
        elif _OURS.search(line):
            if not is_ours:
                kept.append("  ...")
            is_ours = True
        if not is_ours:
            kept.append(line)
    return re.sub(_IDLE_THREAD, "", "\n".join(kept)).strip()


def describe_flights(flights: Mapping[int, str]) -> str:
    """Return the last collectives of each rank, with those that it waits in.

    Args:
        flights: Rank -> JSON of NCCL's flight recorder; what cannot be read counts as none.
    """
    lines: list[str] = []
    for rank, text in sorted(flights.items()):
        with contextlib.suppress(LookupError, TypeError, ValueError):
            entries = cast("_Record", parse_json(text))["entries"]
            lines += [f"rank {rank}: {_collective(entry)}" for entry in entries[-_MOST_LISTED:]]
    return "\n".join(lines)


def _collective(entry: Mapping[str, JsonValue]) -> str:
    """Return `all_reduce, collective 6 of group 0 (default_pg), started, input [[4]]`.

    Raises:
        LookupError: It is not as torch writes it.
    """
    name = str(entry["profiling_name"])
    group, about = cast("list[str]", entry["process_group"])
    return (
        f"{name.partition(':')[2] or name}, collective {entry['collective_seq_id']} of group "
        f"{group} ({about}), {entry['state']}, input {entry['input_sizes']}"
    )

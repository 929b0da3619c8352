"""Texts about ranks that sent no report: stacks, and records of NCCL's flight recorder. Pure."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path

from pytest_megatron.errors import TriageError
from pytest_megatron.gangs.rank.logs import FLIGHT_FILE
from pytest_megatron.triage.collectives import analyse
from pytest_megatron.triage.logs.flight_recorder import FlightDump, FlightEntry, parse_flight

_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<name>.+)$')
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen")
_PYTESTS = re.compile(r"/(?:_pytest|pluggy)/")
_PACKAGE = Path(__file__).parents[1]
_PARTS = "|".join(sorted(path.stem for path in _PACKAGE.iterdir()))  # a checkout has tests as well
_OURS = re.compile(rf"{_PYTESTS.pattern}|/{_PACKAGE.name}/(?:{_PARTS})(?:/|\.py\")")
# Calls that start processes, or wait for those that were started.
_PROCESSES = re.compile(
    r"/subprocess\.py$|/multiprocessing/\w+\.py$|/torch/distributed/launcher/"
    r"|/torch/testing/_internal/common_distributed\.py$"
)
_IDLE_THREAD = r"(?m)^(?:Current thread|Thread)[^\n]*\n  \.\.\.\n*"  # a thread of this package
_CRASHED = re.compile(r"Current thread [^\n]*\n(?:  [^\n]*(?:\n|$))+")
_MOST_LISTED = 3


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


def waits_for_own_processes(stack: str) -> bool:
    """Return whether the user's code itself called what starts processes or waits for their end."""
    called = list(takewhile(_is_of_library, _called_frames(stack)))
    return bool(called) and _PROCESSES.search(called[-1]["file"]) is not None


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
    """Name the first collective that not every rank entered, and the last ones of each rank.

    Args:
        flights: Rank -> JSON of NCCL's flight recorder; what cannot be read counts as none.
    """
    dumps: dict[int, FlightDump] = {}
    for rank, text in sorted(flights.items()):
        with contextlib.suppress(TriageError):
            dumps[rank] = parse_flight(text.encode(errors="replace"), Path(FLIGHT_FILE))
    lines = [mismatch.text for mismatch in analyse(dumps)]
    lines += [
        f"rank {rank}: {entry.op}, collective {entry.seq} of group {entry.group}, {entry.state}"
        f"{_inputs(entry)}"
        for rank, dump in dumps.items()
        for entry in dump.entries[-_MOST_LISTED:]
    ]
    return "\n".join(lines)


def _inputs(entry: FlightEntry) -> str:
    sizes = [list(shape) for shape in entry.input_sizes]
    return f", input {sizes}" if sizes else ""

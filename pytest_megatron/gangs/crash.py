"""Texts about ranks that sent no report: stacks, and records of NCCL's flight recorder. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

from pytest_megatron.base.files import JsonValue, parse_json

_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<name>.+)$')
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen")
_OURS = re.compile(r"/(?:_pytest|pluggy|pytest_megatron/(?:gang|hooks|process))/")
_IDLE_THREAD = r"(?m)^(?:Current thread|Thread)[^\n]*\n  \.\.\.\n*"  # a thread of this package
_CRASHED = re.compile(r"Current thread [^\n]*\n(?:  [^\n]*(?:\n|$))+")
_MOST_LISTED = 3


def innermost_frame(stack: str) -> str | None:
    """Return `test_moe.py:14 in test_dispatch`, the deepest own frame of the main thread.

    Args:
        stack: Text of faulthandler, most recent call first.
    """
    main_thread = re.split(r"(?m)^(?:Current thread|Thread) .*$", stack)[-1]  # the last one
    frames = [m for line in main_thread.splitlines() if (m := _FRAME.match(line))]
    # Below the first frame of pytest is the program that started it.
    called = list(takewhile(lambda m: _OURS.search(m[0]) is None, frames))
    frames = called or [m for m in frames if not _OURS.search(m[0])]
    own = [m for m in frames if not any(part in m["file"] for part in _LIBRARIES)]
    chosen = (own or frames)[:1]
    if not chosen:
        return None
    return f"{Path(chosen[0]['file']).name}:{chosen[0]['line']} in {chosen[0]['name']}"


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _PendingCollective:
    """One collective as a rank's flight recorder has it."""

    group: str
    number: int
    name: str
    state: str
    shapes: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _FlightRecord:
    """Flight record of one rank.

    Attributes:
        members: Group -> its ranks, as far as this rank is one of them.
    """

    collectives: tuple[_PendingCollective, ...] = ()
    members: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def describe_flights(flights: Mapping[int, str]) -> str:
    """Name the first collective that not every rank entered, and the last ones of each rank.

    Args:
        flights: Rank -> JSON of NCCL's flight recorder.

    Source: the format is that of torch/csrc/distributed/c10d/FlightRecorder.hpp, torch 2.11.
    """
    records = {rank: _read(text) for rank, text in sorted(flights.items())}
    groups = {c.group for record in records.values() for c in record.collectives}
    lines = [line for group in sorted(groups) for line in _compare(group, records)]
    lines += [
        f"rank {rank}: {c.name} #{c.number} of group {c.group}, {c.state}{c.shapes}"
        for rank, record in records.items()
        for c in record.collectives[-_MOST_LISTED:]
    ]
    return "\n".join(lines)


def _compare(group: str, records: Mapping[int, _FlightRecord]) -> list[str]:
    """Name the first collective of a group that some rank of it did not enter."""
    by_rank = {
        rank: {c.number: c for c in record.collectives if c.group == group}
        for rank, record in records.items()
    }
    known = {rank for record in records.values() for rank in record.members.get(group, ())}
    members = [rank for rank in records if rank in known or by_rank[rank]]
    for number in sorted({n for found in by_rank.values() for n in found}):
        have = [rank for rank in members if number in by_rank[rank]]
        lack = [rank for rank in members if number not in by_rank[rank]]
        open_ = [rank for rank in have if by_rank[rank][number].state != "completed"]
        if lack and open_:
            name = by_rank[have[0]][number].name
            called = f"called by rank {_join(have)}, not by rank {_join(lack)}"
            return [f"{name} #{number} of group {group}: {called}"]
    return []


def _join(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))


def _read(text: str) -> _FlightRecord:
    """Return the record of one rank; an empty one where the text is not in NCCL's format."""
    try:
        content = parse_json(text, is_lenient=True)
        if not isinstance(content, dict):
            return _FlightRecord()
        groups, entries = content.get("pg_config"), content.get("entries")
        return _FlightRecord(
            collectives=tuple(
                _collective(entry)
                for entry in (entries if isinstance(entries, list) else ())
                if isinstance(entry, dict)
            ),
            members={
                name: tuple(int(number) for number in re.findall(r"\d+", str(group.get("ranks"))))
                for name, group in (groups if isinstance(groups, dict) else {}).items()
                if isinstance(group, dict)
            },
        )
    except (TypeError, ValueError):
        return _FlightRecord()


def _collective(entry: Mapping[str, JsonValue]) -> _PendingCollective:
    """Return a collective that did not finish, from an entry of the flight recorder."""
    group = entry.get("process_group") or ["?", "?"]
    sizes = entry.get("input_sizes")
    return _PendingCollective(
        group=str(group[0]) if isinstance(group, list) else str(group),
        number=int(str(entry.get("collective_seq_id", entry.get("seq_id")) or 0)),
        name=str(entry.get("profiling_name", "?")),
        state=str(entry.get("state", "?")),
        shapes=f", input {sizes}" if sizes else "",
    )

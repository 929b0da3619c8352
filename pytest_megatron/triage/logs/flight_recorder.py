"""Reads what a rank's flight recorder wrote: torch's pickle, and the JSON of our gangs.

A dump comes from a run that may be anybody's, so its pickle may build nothing but plain data; a
name in it ends the reading. Knows neither logs nor the dumps of other ranks.

Source: torch/csrc/distributed/c10d/FlightRecorder.hpp and FlightRecorderDetail.hpp, format 2.10
(torch 2.11, 2.13); the pickle and the JSON have the same keys.
"""

from __future__ import annotations

import io
import json
import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn, TypeAlias

from typing_extensions import override

from pytest_megatron.base.files import read_bytes
from pytest_megatron.errors import TriageError

_MOST_BYTES = 256 << 20
_LIBRARY = re.compile(r"/(?:site|dist)-packages/|/lib/python3|^<frozen|\.(?:cpp|cc|h)$")
_RANK = re.compile(r"(\d+)(?:\.(?:json|pkl|pickle))?$")
# What torch calls a dump where nobody names one (TORCH_FR_DUMP_TEMP_FILE), and gangs.
_USUAL_NAME = re.compile(
    r"(?:(?:nccl|comm_lib|torchcomms?)_trace_(?:rank_)?\d+"
    r"|(?:nccl_)?flight_?recorder\w*?(?:[._-]?\d+)?(?:\.(?:json|pkl|pickle))?)"
)
_Plain: TypeAlias = "object"


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightFrame:
    """A place in Python code."""

    file: str
    line: int
    name: str

    @override
    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line} in {self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightEntry:
    """One collective, or one send or receive, as a rank recorded it.

    Attributes:
        record: Counts what the rank recorded, from 0; a full buffer drops the lowest.
        group: torch's name of the process group, the same on every rank: `0`, `3`.
        group_name: What the group was called when it was made: `default_pg`, `TENSOR_MODEL_...`.
        seq: Counts the collectives of the group, from 1; of a send or receive, those before it.
        op: Without the backend: `all_reduce`, `send 0->1`.
        input_sizes: One shape a tensor.
        input_dtypes: As torch writes them: `Float`, `BFloat16`.
        state: `scheduled` (in a stream), `started` (its kernel runs), `completed`.
        is_retired: Whether torch has stopped waiting for it; gloo shows its end in nothing else.
        created_ns: When it was called, by that host's clock, in nanoseconds since the epoch.
    """

    record: int
    group: str
    group_name: str
    seq: int
    op: str
    is_p2p: bool
    input_sizes: tuple[tuple[int, ...], ...]
    output_sizes: tuple[tuple[int, ...], ...]
    input_dtypes: tuple[str, ...]
    state: str
    is_retired: bool
    created_ns: int
    _frames: Sequence[_Plain] = field(compare=False, repr=False)

    @property
    def frames(self) -> tuple[FlightFrame, ...]:
        """Stack of the call, innermost first; none in JSON. Made when it is asked for."""
        return tuple(
            FlightFrame(
                file=str(f.get("filename")), line=_int(f.get("line")), name=str(f.get("name"))
            )
            for f in self._frames
            if isinstance(f, dict)
        )

    @property
    def is_open(self) -> bool:
        """True if the rank still waits for it."""
        return self.state != "completed" and not self.is_retired

    @property
    def own_frame(self) -> FlightFrame | None:
        """The innermost frame outside of libraries, None where no frame is known."""
        return next((f for f in self.frames if not _LIBRARY.search(f.file)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightDump:
    """Dump of one rank.

    Attributes:
        path: The file it was read from.
        rank: By the file's name, or its directory's; None where neither ends in a number.
        version: Version of the format, such as `2.10`.
        entries: In the order of `record`.
        groups: Group -> its global ranks, as far as the dump knows them.
    """

    path: Path
    rank: int | None
    version: str
    entries: tuple[FlightEntry, ...]
    groups: Mapping[str, tuple[int, ...]]


def is_flight_name(name: str) -> bool:
    """Return true if a file's name is that of a dump: torch's usual names, and our gangs'."""
    return _USUAL_NAME.fullmatch(name) is not None


def read_flight(path: Path) -> FlightDump:
    """Read the dump of one rank's flight recorder.

    Raises:
        TriageError: It cannot be read, is too large, or is no dump.
    """
    try:
        return parse_flight(read_bytes(path, _MOST_BYTES), path)
    except OSError as error:
        raise TriageError(str(path), f"cannot be read: {error.strerror}") from error


def parse_flight(data: bytes, path: Path) -> FlightDump:
    """Read a dump that is in memory.

    Args:
        data: Pickle or JSON.
        path: Where it is from: its name gives the rank, and errors name it.

    Raises:
        TriageError: It is no dump.
    """
    content = _load(data, path)
    if not isinstance(content, dict) or not ({"entries", "pg_config"} & content.keys()):
        raise _no_dump(path, "it has no entries")
    raw_groups = content.get("pg_config", {})
    try:
        entries = [_entry(each) for each in content.get("entries", [])]
        groups = {str(name): _ranks(about) for name, about in raw_groups.items() if name}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _no_dump(path, f"an entry is wrong, {type(error).__name__}: {error}") from error
    entries.sort(key=lambda entry: entry.record)
    return FlightDump(
        path=path,
        rank=rank_of(path),
        version=str(content.get("version", "")),
        entries=tuple(entries),
        groups=groups,
    )


def rank_of(path: Path) -> int | None:
    """Return the rank that a dump's name ends in, or else its directory's."""
    for name in (path.name, path.parent.name):
        if found := _RANK.search(name):
            return int(found[1])
    return None


class _PlainUnpickler(pickle.Unpickler):
    """Builds dictionaries, lists, tuples, numbers and strings; looks no name up."""

    @override
    def find_class(self, module: str, name: str, /) -> NoReturn:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, and a dump is plain data")

    @override
    def persistent_load(self, pid: _Plain, /) -> NoReturn:
        raise pickle.UnpicklingError("it refers to something outside, and a dump is plain data")


def _load(data: bytes, path: Path) -> _Plain:
    """Read a dump, JSON or a pickle of plain values."""
    try:
        if data.lstrip()[:1] == b"{":
            return json.loads(data)
        return _PlainUnpickler(io.BytesIO(data)).load()
    # A torn or foreign pickle fails in as many ways as it has instructions.
    except Exception as error:
        reason = str(error) if isinstance(error, pickle.UnpicklingError) else ""
        raise _no_dump(path, reason or f"{type(error).__name__} while reading it") from error


def _no_dump(path: Path, reason: str) -> TriageError:
    """Return the error that a file is no dump."""
    return TriageError(
        str(path),
        f"is no flight recorder's dump: {reason}; expected torch's pickle or JSON with entries",
    )


def _entry(raw: dict[str, _Plain]) -> FlightEntry:
    """Return a collective from an entry of a dump."""
    group, group_name = _group(raw.get("process_group"))
    called = str(raw["profiling_name"])
    return FlightEntry(
        record=_int(raw["record_id"]),
        group=group,
        group_name=group_name,
        seq=_int(raw.get("collective_seq_id", raw.get("seq_id"))),
        op=called.partition(":")[2] or called,
        is_p2p=bool(raw.get("is_p2p", False)),
        input_sizes=_sizes(raw.get("input_sizes")),
        output_sizes=_sizes(raw.get("output_sizes")),
        input_dtypes=tuple(map(str, _list(raw.get("input_dtypes")))),
        state=str(raw["state"]),
        is_retired=bool(raw.get("retired", False)),
        created_ns=_int(raw.get("time_created_ns")),
        _frames=_list(raw.get("frames")),
    )


def _group(raw: _Plain) -> tuple[str, str]:
    """Return name and description of a process group."""
    if not isinstance(raw, list | tuple) or len(raw) != len(("name", "description")):
        raise TypeError(f"process_group {raw!r}")
    return str(raw[0]), str(raw[1])


def _sizes(raw: _Plain) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(_int, _list(shape))) for shape in _list(raw))


def _int(raw: _Plain) -> int:
    """Return a number, 0 for what is not there; torch writes some of them as text."""
    return raw if isinstance(raw, int) else int(str(raw or 0))


def _list(raw: _Plain) -> Sequence[_Plain]:
    return raw if isinstance(raw, list | tuple) else ()


def _ranks(about: _Plain) -> tuple[int, ...]:
    """Read `[0, 1]`, which torch writes as text."""
    ranks = about.get("ranks", "") if isinstance(about, dict) else about
    return tuple(int(number) for number in re.findall(r"\d+", str(ranks)))

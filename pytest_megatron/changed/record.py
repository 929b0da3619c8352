"""The record of what tests used: one file, which CI jobs share. Pure but for reading and writing.

Blocks are kept with their digests, so that a test is compared with the files as they were when it
ran, whatever commit that was. Files of other versions are read as empty: then every test runs.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from pytest_megatron.base.files import read_bytes
from pytest_megatron.base.schema import SchemaError, parse
from pytest_megatron.errors import ConfigError

SCHEMA = 1
FILE_NAME = "changed.z"
_MOST_BYTES = 1 << 30  # of the text


@dataclass(frozen=True, kw_only=True)
class ProjectState:
    """A project and an environment, as they were when tests ran.

    Attributes:
        environment: Name -> version, of Python and of packages.
        files: Path -> digest.
    """

    environment: dict[str, str]
    files: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class TestEntry:
    """One test or workload.

    Attributes:
        state: Number of its state.
        mode: Kind and number of its ranks.
        time: Seconds since 1970, when it was recorded.
        duration_s: Of its last run.
        problem: Why it runs whatever changed, or "".
        blocks: Numbers of its blocks.
    """

    __test__ = False  # to pytest

    state: int
    mode: str
    time: float
    duration_s: float
    problem: str = ""
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TestRecord:
    """The content of the file.

    Attributes:
        states: Those that entries name.
        blocks: Path, name and digest.
        tests: By node id.
        collected: File of tests -> how many it had.
    """

    __test__ = False  # to pytest

    schema: int = SCHEMA
    states: tuple[ProjectState, ...] = ()
    blocks: tuple[tuple[str, str, str], ...] = ()
    tests: dict[str, TestEntry] = field(default_factory=dict)
    collected: dict[str, int] = field(default_factory=dict)


def read_record(path: Path) -> TestRecord:
    """Return the record in a file; an empty one where it is not there or of another version.

    Raises:
        ConfigError: It cannot be read.
    """
    where = str(path)
    try:
        unpacker = zlib.decompressobj()
        text = unpacker.decompress(read_bytes(path), _MOST_BYTES)
        if unpacker.unconsumed_tail or not unpacker.eof:
            raise ConfigError(where, "is damaged or too large; remove it, and record again")
        if json.loads(text).get("schema") != SCHEMA:
            return TestRecord()
        return parse(TestRecord, text)
    except FileNotFoundError:
        return TestRecord()
    except OSError as error:
        raise ConfigError(where, f"cannot be read: {error.strerror}") from None
    except (zlib.error, ValueError, AttributeError, SchemaError):
        raise ConfigError(
            where, "is no record of tests, or is damaged; remove it, and record again"
        ) from None


def write_record(path: Path, record: TestRecord) -> None:
    """Replace a file by a record; a reader sees the old one or the new one.

    Raises:
        OSError: It cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(zlib.compress(json.dumps(asdict(record)).encode(), 6))
    temporary.replace(path)


def merge_records(records: Iterable[TestRecord]) -> TestRecord:
    """Return one record of several; of two entries of a test the later one."""
    states: list[ProjectState] = []
    blocks: dict[tuple[str, str, str], int] = {}
    tests: dict[str, TestEntry] = {}
    collected: dict[str, int] = {}
    for record in records:
        numbers = [_number(states, state) for state in record.states]
        places = [blocks.setdefault(block, len(blocks)) for block in record.blocks]
        collected |= record.collected
        for node_id, entry in record.tests.items():
            if node_id not in tests or tests[node_id].time <= entry.time:
                tests[node_id] = replace(
                    entry,
                    state=numbers[entry.state],
                    blocks=tuple(places[block] for block in entry.blocks),
                )
    return _without_unused(
        TestRecord(states=tuple(states), blocks=tuple(blocks), tests=tests, collected=collected)
    )


def _number(states: list[ProjectState], state: ProjectState) -> int:
    if state not in states:
        states.append(state)
    return states.index(state)


def _without_unused(record: TestRecord) -> TestRecord:
    """Return a record without the states and blocks that no entry names."""
    states = sorted({entry.state for entry in record.tests.values()})
    used = sorted({block for entry in record.tests.values() for block in entry.blocks})
    new_states = {old: new for new, old in enumerate(states)}
    new_blocks = {old: new for new, old in enumerate(used)}
    return replace(
        record,
        states=tuple(record.states[old] for old in states),
        blocks=tuple(record.blocks[old] for old in used),
        tests={
            node_id: replace(
                entry,
                state=new_states[entry.state],
                blocks=tuple(new_blocks[block] for block in entry.blocks),
            )
            for node_id, entry in record.tests.items()
        },
    )


def restamped(record: TestRecord, node_ids: Iterable[str], state: ProjectState) -> TestRecord:
    """Return the entries of tests that nothing changed for, as if they had run in a state now."""
    kept = [node_id for node_id in node_ids if node_id in record.tests]
    return replace(
        record,
        states=(state,),
        tests={node_id: replace(record.tests[node_id], state=0) for node_id in kept},
        collected={},
    )

"""The record of what tests used: one file, which CI jobs share. Pure but for reading and writing.

Blocks are kept with their digests, so that a test is compared with the files as they were when it
ran, whatever commit that was. Files of other versions are read as empty: then every test runs.
"""

from __future__ import annotations

import functools
import json
import posixpath
import zlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import cast

from pytest_megatron.base.files import (
    JsonValue,
    json_objects,
    read_bytes,
    write_bytes_atomically,
)
from pytest_megatron.base.schema import SchemaError, parse
from pytest_megatron.changed.sources import (
    EXISTS,
    LISTING,
    MODULE,
    WHOLE,
    Sources,
    block_named,
    block_of_code,
    decompressed,
)
from pytest_megatron.errors import ConfigError
from pytest_megatron.runs.layout import OWN_DIR

SCHEMA = 2
DEFAULT_FILE = OWN_DIR / "changed.z"
_MOST_BYTES = 1 << 30  # of the text


@dataclass(frozen=True, kw_only=True)
class ProjectState:
    """A project and an environment, as they were when tests ran.

    Attributes:
        environment: Name -> version, of Python and of packages.
        files: Path in the checkout -> digest.
        root: Path of pytest's root in the checkout; node ids are relative to it.
    """

    environment: dict[str, str]
    files: dict[str, str]
    root: str = ""

    def file_of(self, node_id: str) -> str:
        """Return the file of a test, relative to the checkout."""
        return posixpath.normpath(posixpath.join(self.root, node_id.partition("::")[0]))


@dataclass(frozen=True, kw_only=True)
class TestEntry:
    """One test or workload.

    Attributes:
        state: Number of its state.
        mode: Kind and number of its ranks; of a workload its platform as well.
        time: Seconds since 1970, when it was recorded.
        duration_s: Duration of the last run.
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
        text = decompressed(path, _MOST_BYTES)
        if json.loads(text).get("schema") != SCHEMA:
            return TestRecord()
        return parse(TestRecord, text)
    except FileNotFoundError:
        return TestRecord()
    except OSError as error:
        raise ConfigError(where, f"cannot be read: {error.strerror}") from None
    except (ValueError, AttributeError, SchemaError):
        problem = "is no record of tests, or is damaged or too large; remove it, and record again"
        raise ConfigError(where, problem) from None


def write_record(path: Path, record: TestRecord) -> None:
    """Replace a file by a record; a reader sees the old one or the new one.

    Raises:
        OSError: It cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes_atomically(path, zlib.compress(json.dumps(asdict(record)).encode(), 6))


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
    """Return the place of a state in the list, at whose end it is put if it is new."""
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


def num_gpus(mode: str) -> int:
    """Return the number of GPUs of a test that was recorded with a kind and number of ranks."""
    kind, _, number = mode.rpartition(" x")
    return int(number) if kind and "cpu" not in kind.split() else 0


def restamped(record: TestRecord, node_ids: Iterable[str], state: ProjectState) -> TestRecord:
    """Return the entries of tests that nothing changed for, as if they had run in a state now."""
    kept = [node_id for node_id in node_ids if node_id in record.tests]
    return replace(
        record,
        states=(state,),
        tests={node_id: replace(record.tests[node_id], state=0) for node_id in kept},
        collected={},
    )


IMPORT = "import:"  # in front of the file
COLLECT = "collect:"  # in front of the file
_FILES = ("loaded", "whole", "opened", "listed", "asked", "cached", "filled", "uses")
_NO_CODE = (WHOLE, LISTING, EXISTS)
# Names of methods of Python's own types: most calls of them are none of a method of the project.
_COMMON = frozenset(name for kind in (bytes, dict, list, set, str) for name in dir(kind))
_MAKING = ("__init__", "__new__", "__post_init__")  # which the name of their class calls
_READING = frozenset(
    ("open", "read", "read_text", "read_bytes", "load", "glob", "iterdir", "listdir")
)
_BLOCKS = (("opened", WHOLE), ("listed", LISTING), ("asked", EXISTS))


@dataclass(slots=True)
class WindowNotes:
    """What all processes noted of one window.

    Attributes:
        code: File and qualified name.
        files: Kind -> full names; `uses` are keys of other windows.
        ranks: Those that noted something; `num_ranks` is their number, 0 without ranks.
        num_processes: Lines of any process.
        file: File of the test, relative to the checkout.
        mode: Kind and number of its processes.
        counts: File -> how many tests it has.
    """

    code: set[tuple[str, str]] = field(default_factory=set)
    files: dict[str, set[str]] = field(default_factory=lambda: {kind: set() for kind in _FILES})
    ranks: set[int] = field(default_factory=set)
    num_ranks: int = 0
    num_processes: int = 0
    problem: str = ""
    file: str = ""
    mode: str = ""
    counts: dict[str, int] = field(default_factory=dict)

    def add(self, line: Mapping[str, JsonValue]) -> None:
        """Add what one process noted, a line of its file."""
        self.num_processes += 1
        self.problem = self.problem or str(line.get("problem", ""))
        code = cast("dict[str, list[str]]", line.get("code", {}))
        self.code |= {(path, name) for path, names in code.items() for name in names}
        for kind in _FILES:
            self.files[kind] |= set(cast("list[str]", line.get(kind, [])))
        self.file = str(line.get("file", self.file))
        self.mode = str(line.get("mode", self.mode))
        self.counts |= cast("dict[str, int]", line.get("counts", {}))
        if "rank" in line:
            self.ranks.add(cast("int", line["rank"]))
            self.num_ranks = max(self.num_ranks, cast("int", line["world"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedTest:
    """A test that ran.

    Attributes:
        file: Relative to the checkout.
        mode: Kind and number of its ranks.
        num_ranks: Ranks that have to have noted something; 0 for none.
        problem: Why it runs whatever changes, or "".
    """

    file: str
    mode: str
    num_ranks: int
    duration_s: float
    problem: str


def read_notes(directory: Path) -> dict[str, WindowNotes]:
    """Return what all processes noted of each window, by its key; skip lines that were cut off."""
    found: dict[str, WindowNotes] = {}
    for path in sorted(directory.iterdir()):
        for line in json_objects(read_bytes(path)):
            found.setdefault(str(line.get("key", "")), WindowNotes()).add(line)
    return found


class Joiner:
    """Joins the notes of a session."""

    def __init__(
        self,
        notes: Mapping[str, WindowNotes],
        sources: Sources,
        started: float,
        described: float,
    ) -> None:
        """Begin without any file read.

        Args:
            notes: By key.
            sources: The project now.
            started: Seconds since 1970, when the session began: later files are not what ran.
            described: When the state of the project was read, after that.
        """
        self._notes = notes
        self._sources = sources
        self._started = started
        self._described = described
        self._numbers: dict[tuple[str, str, str], int] = {}  # of the blocks
        self._imported = functools.cache(self._find_imported)
        self._block = functools.cache(self._find_block)
        self._code = functools.cache(self._find_code)
        self._window = functools.cache(self._find_window)
        self._cached = functools.cache(self._find_cached)
        self._kept = functools.cache(self._find_kept)
        self._keeping = functools.cache(sources.keeping)
        self._collected = functools.cache(self._find_collected)
        self._filled: dict[str, set[str]] = {}  # cached function -> windows that called it
        self._imports: dict[str, list[str]] = {}  # module -> windows of its imports
        for key, window in notes.items():
            module = sources.shorten(key.removeprefix(IMPORT)) if key.startswith(IMPORT) else None
            if module is not None:
                self._imports.setdefault(module, []).append(key)
            for cache in window.files["filled"]:
                self._filled.setdefault(cache, set()).add(key)

    def record(
        self,
        tests: Mapping[str, FinishedTest],
        state: ProjectState,
        collected: Mapping[str, int],
        now: float,
    ) -> TestRecord:
        """Return the record of the tests that ran."""
        keys = {node_id: self._keys(node_id, test.file) for node_id, test in tests.items()}
        used = {node_id: self._blocks(keys[node_id], test.file) for node_id, test in tests.items()}
        read = {block: n for block, n in self._numbers.items() if block[1] != EXISTS}
        written = {path for path in {path for path, _, _ in read} if self._is_written(path, state)}
        late = {n: block[0] for block, n in read.items() if block[0] in written}
        entries = {
            node_id: TestEntry(
                state=0,
                mode=test.mode,
                time=now,
                duration_s=round(test.duration_s, 3),
                problem=test.problem
                or self._problem(node_id, test, keys[node_id])
                or _problem_of_files({late[number] for number in used[node_id] & late.keys()}),
                blocks=tuple(sorted(used[node_id])),
            )
            for node_id, test in tests.items()
        }
        return TestRecord(
            states=(state,), blocks=tuple(self._numbers), tests=entries, collected=dict(collected)
        )

    def _keys(self, node_id: str, file: str) -> list[str]:
        """Return the windows of a test, its fixtures, and the session."""
        keys = {node_id, f"{COLLECT}{file}", ""}
        waiting = list(keys)
        while waiting:
            new = self._notes.get(waiting.pop(), WindowNotes()).files["uses"] - keys
            keys |= new
            waiting += new
        return sorted(keys & self._notes.keys())

    def _problem(self, node_id: str, test: FinishedTest, keys: Iterable[str]) -> str:
        """Return why the record of a test is incomplete, or ""."""
        own = self._notes.get(node_id)
        if own is None:
            return "no process recorded it"
        num_ranks = max(test.num_ranks, own.num_ranks)
        if len(own.ranks) < num_ranks:
            return f"{len(own.ranks)} of {num_ranks} ranks were recorded"
        return next((p for key in keys if (p := self._notes[key].problem)), "")

    def _blocks(self, keys: Iterable[str], file: str) -> set[int]:
        """Return the blocks that the windows used, and all that is executed to import them."""
        collected, modules_of_file = self._collected(file)
        own, starts = set(collected), set(modules_of_file)
        used = [self._window(key) for key in keys]
        used += map(self._cached, set().union(*(self._notes[key].files["cached"] for key in keys)))
        for blocks, files in used:
            own |= blocks
            starts |= files
        reached: set[str] = set()
        for start in sorted(starts, key=lambda start: (start != file, start)):
            if start not in reached:  # else it has nothing that is not there yet
                modules, blocks = self._imported(start)
                reached |= modules
                own |= blocks
        return own

    def _find_collected(self, file: str) -> tuple[frozenset[int], frozenset[str]]:
        """Return the blocks and modules that all tests of a file use."""
        conftests = self._sources.conftests(file)
        blocks = frozenset(self._block(path, WHOLE) for path in conftests)
        return blocks, frozenset((file, *conftests))

    def _find_window(self, key: str) -> tuple[frozenset[int], frozenset[str]]:
        """Return the blocks that a window used, and the modules that it needs."""
        code = self._code(key)
        kinds = {kind: self._paths(names) for kind, names in self._notes[key].files.items()}
        names = {(p, block_of_code(name)) for p, name in code}
        keepers = {(p, name) for p, name in names if name in self._keeping(p)}
        kept = set[tuple[str, str]]().union(*(self._kept(p, name) for p, name in keepers))
        names |= kept
        names |= {(p, WHOLE) for p in kinds["whole"]}
        names |= self._files_of(key)
        starts = kinds["loaded"] | kinds["whole"] | {p for p, _ in code}
        starts |= {p for p, name in kept if name not in _NO_CODE}
        return frozenset(self._block(*pair) for pair in names), frozenset(starts)

    @functools.cached_property
    def _runs(self) -> Mapping[tuple[str, str], Collection[str]]:
        """Function that keeps what it computed -> windows in which it ran."""
        found: dict[tuple[str, str], set[str]] = {}
        for key in self._notes:
            for path, name in self._code(key):
                block = block_of_code(name)
                if block in self._keeping(path):
                    found.setdefault((path, block), set()).add(key)
        return found

    def _find_kept(self, path: str, function: str) -> frozenset[tuple[str, str]]:
        """Return what computed the values that a function may have kept, in any window.

        That is the code whose name stands in it, directly or in such code, and that ran where it
        ran as well, but for methods of strings and containers in such code; and the files that
        these windows read, if a name says that it reads.
        """
        windows = self._runs[path, function]
        code = set[tuple[str, str]]().union(*map(self._code, windows))
        by_name: dict[str, set[tuple[str, str]]] = {}
        for pair in code:
            *_, owner, name = ".", *pair[1].split(".")
            by_name.setdefault(owner if name in _MAKING else name, set()).add(pair)
        found: set[tuple[str, str]] = set()
        names, waiting = set[str](), set(self._keeping(path)[function])
        while waiting:
            name = waiting.pop()
            names.add(name)
            for at, qualname in by_name.pop(name, ()):
                block = block_of_code(qualname)
                if (at, block) not in found:
                    found.add((at, block))
                    waiting |= self._sources.names_in(at, block) - names - _COMMON
        if not names.isdisjoint(_READING):
            found |= set[tuple[str, str]]().union(*map(self._files_of, windows))
        return frozenset(found)

    def _find_cached(self, cache: str) -> tuple[frozenset[int], frozenset[str]]:
        """Return the blocks and modules that computed the values of a cached function.

        That was done in the windows that filled it, by code that it can reach.
        """
        names: set[tuple[str, str]] = set()
        seen, waiting = {cache}, [cache]
        while waiting:
            own = waiting.pop()
            reach = self._sources.closure(self._file_of(own))
            for key in self._filled.get(own, ()):
                names |= {(p, block_of_code(name)) for p, name in self._code(key) if p in reach}
                names |= self._files_of(key)
                inner = {
                    c for c in self._notes[key].files["cached"] if self._file_of(c) in reach
                } - seen
                seen |= inner
                waiting += inner
        starts = frozenset(p for p, block in names if block not in _NO_CODE)
        return frozenset(self._block(*pair) for pair in names), starts

    def _files_of(self, key: str) -> set[tuple[str, str]]:
        """Return the files and folders that a window used by other means than to run them."""
        files = self._notes[key].files
        return {(path, block) for kind, block in _BLOCKS for path in self._paths(files[kind])}

    def _paths(self, full_names: Iterable[str]) -> set[str]:
        """Return the paths of the project's files among those with full names."""
        return {path for name in full_names if (path := self._sources.shorten(name))}

    def _file_of(self, cache: str) -> str:
        return self._sources.shorten(cache.partition("::")[0]) or ""

    def _find_imported(self, start: str) -> tuple[frozenset[str], frozenset[int]]:
        """Return the modules that are executed to import a file, and the blocks that they use."""
        names: set[tuple[str, str]] = set()
        reached: set[str] = set()
        waiting = {start}
        while waiting:
            for module in self._sources.closure(waiting.pop()) - reached:
                reached.add(module)
                for key in self._imports.get(module, ()):
                    found, files = self._code(key), self._notes[key].files
                    names |= {(p, block_of_code(name)) for p, name in found}
                    names |= self._files_of(key)
                    waiting |= ({p for p, _ in found} | self._paths(files["loaded"])) - reached
        names |= {(module, MODULE) for module in reached}
        return frozenset(reached), frozenset(self._block(*pair) for pair in names)

    def _find_code(self, key: str) -> frozenset[tuple[str, str]]:
        code = self._notes[key].code
        return frozenset((p, name) for full, name in code if (p := self._sources.shorten(full)))

    def _find_block(self, path: str, name: str) -> int:
        """Return the number of the block of code with a name."""
        found = self._sources.blocks(path)
        kept = block_named(path, name, found)
        if kept not in found:  # it was to be opened, and is not there
            kept = EXISTS
        return self._numbers.setdefault((path, kept, found[kept]), len(self._numbers))

    def _is_written(self, path: str, state: ProjectState) -> bool:
        """Return true for a file that was written since the session began, but if only touched."""
        full = self._sources.root / path
        if not full.is_file() or full.stat().st_mtime <= self._started:
            return False
        is_same = state.files.get(path, "").startswith(self._sources.blocks(path)[WHOLE])
        return not is_same or full.stat().st_mtime <= self._described


def _problem_of_files(written: Collection[str]) -> str:
    return f"{min(written)} was written while tests ran" if written else ""

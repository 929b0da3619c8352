"""Finds what is judged together in a file, a directory or an artifact.

One unit is one launch: the logs of its ranks and of its launcher. Knows torch's layout
(`<run>/attempt_0/<rank>/stderr.log`), our run directory, Slurm's files and logs of several ranks.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePath
from typing import TypeAlias

from pytest_megatron.errors import TriageError
from pytest_megatron.runs.archives import is_archive, unpack
from pytest_megatron.triage.launch import Known, LogFile, Stream, Unit
from pytest_megatron.triage.logs.flight_recorder import is_flight_name, rank_of
from pytest_megatron.triage.records import is_mismatch, known_of, record_of

ERROR_FILE = "error.json"
RECORDS = ("plan.json", "run.json", "triage.json", "health.json", "comparison.json")
SKIPPED_DIRECTORIES = frozenset(
    {".git", "__pycache__", "checkpoints", "data_cache", "tensorboard", "site-packages", "wandb"}
    | {"node_modules", ".venv"}
)
_LOG_SUFFIXES = (".log", ".out", ".err", ".txt", ".stdout", ".stderr", ".output")
_LOG_NAMES = ("stdout", "stderr", "nohup.out", "output", "log")
_NOT_LOGS = ("requirements.txt", "latest_checkpointed_iteration.txt", "stacks.txt", "script.sh")
_RANK_DIRECTORY = re.compile(r"^(?:rank|local_rank|worker|task|proc)?[-_.]?(\d{1,5})$")
_NODE_DIRECTORY = re.compile(r"^(?:node|host)[-_.]?(\d{1,4})$")
_SAID = re.compile(r"(?:^|[._-])(?:rank|task|proc|worker|r|t)[._-]?(\d{1,5})(?=[._-]|$)")
_LAST = re.compile(r"[._-](\d{1,5})$")
_ENDS = re.compile(r"(?:\.(?:log|out|err|txt|stdout|stderr|output))+$|[._-](?:out|err)$")


def is_log(path: PurePath) -> bool:
    """Return true if a file in a directory is taken for a log."""
    name = path.name.lower()
    if name in _NOT_LOGS or name.startswith("."):
        return False
    return name.endswith(_LOG_SUFFIXES) or name in _LOG_NAMES


def is_worth_reading(path: PurePath) -> bool:
    """Return true if a member of an archive is worth unpacking."""
    if SKIPPED_DIRECTORIES & set(path.parts[:-1]):
        return False
    named = path.name == ERROR_FILE or path.name in RECORDS
    return named or is_log(path) or flight_rank(path) is not None


def flight_rank(path: PurePath) -> int | None:
    """Return the rank of a flight recorder's dump by its name or directory, None if it is none."""
    return rank_of(Path(path)) if is_flight_name(path.name) else None


def directory_rank(path: PurePath) -> int | None:
    """Return the rank that a directory is named after, as torch does, None if it is not."""
    found = _RANK_DIRECTORY.match(path.name)
    return None if found is None else int(found[1])


def node_of(path: PurePath) -> int | None:
    """Return the number of the node that a directory in a path is named after."""
    found = [m for part in path.parts if (m := _NODE_DIRECTORY.match(part)) is not None]
    return int(found[-1][1]) if found else None


def stream_of(path: PurePath) -> Stream:
    """Return which of a rank's logs a file is, by its name."""
    name = path.name.lower()
    if "stderr" in name or name.endswith(".err"):
        return Stream.STDERR
    if "stdout" in name:
        return Stream.STDOUT
    return Stream.BOTH


def ranks_by_name(paths: Iterable[PurePath]) -> Mapping[PurePath, int]:
    """Return whose each of the logs of one directory is, of those that are named after ranks.

    `job_3.out` is rank 3's if there is a `job_0.out` and every number between; `job-rank3.log` and
    Slurm's `%t` always are. Numbers of jobs and of attempts are not taken for ranks.
    """
    said: dict[PurePath, int] = {}
    series: dict[str, dict[int, list[PurePath]]] = {}
    for path in paths:
        stem = _ENDS.sub("", path.name)
        explicit, last = _SAID.search(stem), _LAST.search(f".{stem}")
        if explicit is not None:
            said[path] = int(explicit[1])
        elif last is not None and not re.search(r"(?:attempt|run|try|phase|step|iter)", stem):
            prefix = f".{stem}"[: last.start()]
            series.setdefault(prefix, {}).setdefault(int(last[1]), []).append(path)
    for numbers in series.values():
        if len(numbers) > 1 and sorted(numbers) == list(range(len(numbers))):
            for number, found in numbers.items():
                said.update(dict.fromkeys(found, number))
    return said


_MOST_UP = 5  # directories from the ranks' up to the launcher's log
_PROBE_BYTES = 4096
_CONTROL = frozenset(range(32)) - frozenset(b"\a\b\t\n\v\f\r\x1b") | {127}
_MOST_CONTROL = 0.02  # of the bytes of a log; compressed data has about six times as many
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
_Name: TypeAlias = "Callable[[Path], str]"


def find_units(paths: Sequence[Path], workspace: Path) -> tuple[tuple[Unit, ...], tuple[str, ...]]:
    """Return the launches that paths hold, in a stable order, and what was not read.

    Args:
        paths: Files, directories, archives.
        workspace: A directory of our own, where archives are unpacked.

    Raises:
        TriageError: A path is not there, is no log, or holds none.
    """
    units: list[Unit] = []
    loose: list[Path] = []
    notes: list[str] = []
    for number, path in enumerate(paths):
        if not path.exists():
            raise TriageError(str(path), "no such file or directory")
        if path.is_file() and not is_archive(path):
            _refuse_binary(path)
            loose.append(path)
            continue
        root, shown = path, str(path)
        if path.is_file():
            root, shown = workspace / str(number), f"{path}!"
            root.mkdir()
            unpack(path, root, is_worth_reading)
        found = _in_directory(root, shown, notes)
        if not found:
            raise TriageError(
                str(path), "holds no log: expected files such as <rank>/stderr.log, *.log, *.out"
            )
        units += found
    return (*units, *_units_of_loose_files(loose, str)), tuple(notes)


def _in_directory(root: Path, shown: str, notes: list[str]) -> list[Unit]:
    """Return the launches below a directory; note the files that are called logs and are none."""

    def name(path: Path) -> str:
        """Return a path as it is shown, also within an archive."""
        if shown.endswith("!"):
            return shown + path.relative_to(root).as_posix()
        return str(path)

    by_parent = _by_parent(root, name, notes)
    ranked: defaultdict[Path, list[Path]] = defaultdict(list)  # parent of ranks -> directories
    loose: dict[Path, list[Path]] = {}
    for directory, files in by_parent.items():
        is_ranks = directory_rank(directory) is not None and directory != root
        if is_ranks and any(is_log(f) or f.name == ERROR_FILE for f in files):
            ranked[_group(directory.parent)].append(directory)
        else:
            loose[directory] = files
    units: list[Unit] = []
    for parent in sorted(ranked, reverse=True):  # the last of restarted attempts has the report
        others = [other for other in ranked if other != parent]
        units.append(
            _launch_with_rank_directories(root, ranked[parent], by_parent, loose, (name, others))
        )
    for files in loose.values():
        units += _units_of_loose_files([f for f in files if is_log(f)], name)
    mismatches = [f for files in loose.values() for f in files if is_mismatch(f)]
    for path in mismatches:
        known = Known(record=record_of(path, name(path)))
        units.append(Unit(name=name(path.parent), root=path.parent, logs=(), known=known))
    flights = {p: r for files in loose.values() for p in files if (r := flight_rank(p)) is not None}
    if flights and len(units) == 1:
        found = {rank: path for path, rank in flights.items()}
        units[0] = replace(units[0], flights={**found, **units[0].flights})
    return [
        replace(unit, known=known_of(unit)) for unit in sorted(units, key=lambda unit: unit.name)
    ]


def _by_parent(root: Path, name: _Name, notes: list[str]) -> defaultdict[Path, list[Path]]:
    """Return the files of each directory but those that are called logs and are none."""
    found: defaultdict[Path, list[Path]] = defaultdict(list)
    for path in _walk(root):
        if is_log(path) and not _is_text(path):
            notes.append(f"{name(path)}: is no text, not read")
        else:
            found[path.parent].append(path)
    return found


def _walk(root: Path) -> Iterator[Path]:
    """Yield the files below a directory; follows no link, and leaves out what holds no logs."""
    for directory, names, files in os.walk(root):
        names[:] = sorted(set(names) - SKIPPED_DIRECTORIES)
        for name in sorted(files):
            path = Path(directory, name)
            if path.is_file() and not path.is_symlink():
                yield path


def _group(parent: Path) -> Path:
    """Return what stands for the ranks of all nodes, where directories are named after nodes."""
    if node_of(parent) is None:
        return parent
    parts = [part for part in parent.parts if node_of(Path(part)) is None]
    return Path(*parts)


def _launch_with_rank_directories(
    root: Path,
    directories: Sequence[Path],
    by_parent: dict[Path, list[Path]],
    loose: dict[Path, list[Path]],
    naming: tuple[_Name, Sequence[Path]],
) -> Unit:
    """Return the launch whose ranks have a directory each.

    Takes the logs of its launcher out of `loose`.

    Args:
        root: Nothing above it is looked at.
        directories: Directories of the ranks.
        by_parent: The files of every directory.
        loose: The files that no launch has taken.
        naming: What a person knows a path as; the parents of other launches' ranks.
    """
    name, others = naming
    local_size = 1 + max(directory_rank(directory) or 0 for directory in directories)
    logs: list[LogFile] = []
    errors: dict[int, Path] = {}
    flights: dict[int, Path] = {}
    for directory in directories:
        rank = (directory_rank(directory) or 0) + local_size * (node_of(directory) or 0)
        for file in by_parent[directory]:
            if file.name == ERROR_FILE:
                errors[rank] = file
            elif flight_rank(file) is not None:
                flights[rank] = file
            elif is_log(file):
                log = LogFile(path=file, shown=name(file), rank=rank, stream=stream_of(file))
                logs.append(log)
    parent = directories[0].parent
    top, launchers = _launcher_logs(root, parent, loose, others)
    logs += [LogFile(path=file, shown=name(file), stream=Stream.LAUNCHER) for file in launchers]
    for file in by_parent.get(parent, []):
        number = flight_rank(file)
        if number is not None:
            flights[number] = file
    logs.sort(key=lambda log: (log.rank is None, log.rank or 0, log.shown))
    return Unit(name=name(top), root=top, logs=tuple(logs), error_files=errors, flights=flights)


def _launcher_logs(
    root: Path, parent: Path, loose: dict[Path, list[Path]], others: Sequence[Path]
) -> tuple[Path, list[Path]]:
    """Return the nearest directory at or above the ranks' with logs of its own, and those logs.

    They belong to this launch alone: a directory that other launches are below too keeps its own.
    """
    directory = parent
    for _ in range(_MOST_UP):
        found = [f for f in loose.get(directory, []) if is_log(f)]
        if found:
            loose[directory] = [f for f in loose[directory] if f not in found]
            return directory, found
        above = directory.parent
        if directory in (root, above) or any(_is_apart(o, parent, above) for o in others):
            break
        directory = above
    return parent, []


def _is_apart(other: Path, parent: Path, above: Path) -> bool:
    """Return true if a directory holds another launch too, that is no restart of this one."""
    is_restart = other.parent == parent.parent and other.name.startswith("attempt_")
    return above in other.parents and not is_restart


def _units_of_loose_files(files: Sequence[Path], name: _Name) -> list[Unit]:
    """Return the launches of logs that lie side by side."""
    if not files:
        return []
    ranks = ranks_by_name(files)
    logs = [
        LogFile(path=file, shown=name(file), rank=ranks[file], stream=stream_of(file))
        for file in files
        if file in ranks
    ]
    others = [file for file in files if file not in ranks]
    if logs:
        logs += [LogFile(path=f, shown=name(f), stream=Stream.LAUNCHER) for f in others]
        top = files[0].parent
        return [Unit(name=name(top), root=top, logs=tuple(logs))]
    by_stem: defaultdict[Path, list[Path]] = defaultdict(list)
    for file in others:
        by_stem[file.with_suffix("") if file.suffix in (".out", ".err") else file].append(file)
    if {f.stem for f in others} in ({"stdout", "stderr"}, {"launcher", "stdout", "stderr"}):
        by_stem = defaultdict(list, {files[0].parent: list(others)})
    return [
        Unit(
            name=name(found[0] if len(found) == 1 else stem),
            root=found[0].parent,
            logs=tuple(LogFile(path=f, shown=name(f), stream=Stream.LAUNCHER) for f in found),
        )
        for stem, found in by_stem.items()
    ]


def _is_text(path: Path) -> bool:
    """Return whether a file looks like text."""
    try:
        return _looks_like_text(path)
    except OSError:
        return True  # reading it later gives a note


def _refuse_binary(path: Path) -> None:
    """Make sure that a file that was named is text.

    Raises:
        TriageError: It is not, or cannot be read.
    """
    try:
        is_text = _looks_like_text(path)
    except OSError as error:
        raise TriageError(str(path), f"cannot be read: {error.strerror}") from error
    if not is_text:
        raise TriageError(str(path), "is no text, expected a log, a directory, a zip or a tar")


def _looks_like_text(path: Path) -> bool:
    """Return true if a file is text, by its beginning and end.

    NULs alone make no binary file: torch's handler of signals writes them, and a log that was cut
    while it was written begins with a hole.
    """
    with path.open("rb") as file:
        head = file.read(_PROBE_BYTES)
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - _PROBE_BYTES))
        tail = file.read(_PROBE_BYTES)
    probe = (head + tail).replace(b"\0", b"")
    if head.startswith(_UTF_16):
        return False
    return sum(byte in _CONTROL for byte in probe) <= _MOST_CONTROL * len(probe)

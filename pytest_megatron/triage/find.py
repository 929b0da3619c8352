"""Finds what is judged together in a file, a directory or an artifact, and reads its records.

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
from pytest_megatron.runs.layout import (
    COMPARISON_FILE,
    HEALTH_FILE,
    PLAN_FILE,
    RUN_FILE,
    TRIAGE_FILE,
)
from pytest_megatron.runs.record import (
    RecordedComparison,
    RecordedFailure,
    RecordedHealthFile,
    RecordedMetric,
    RecordedPlan,
    RecordedTriage,
    RecordedWorkload,
    Result,
    read_if_whole,
)
from pytest_megatron.triage.rank_log import End, Known, LogFile, LogLine, Root, Stream, Unit
from pytest_megatron.triage.signatures import Table

_MOST_ABOVE = 6


def with_records(unit: Unit, root: Root | None, table: Table) -> Root | None:
    """Return the root cause as the records see it, which know more than logs.

    A failure that NVML or the kernel reported on the attempt's own GPUs is why it failed, if it
    failed. A golden that disagrees is a failure of its own, of a training that ended well.
    """
    record = unit.known.record
    if record is None:
        return root
    if record.path.name == COMPARISON_FILE:
        return _mismatch(record, table)
    return None if root is None else _with_fault(record, root, table)


def is_mismatch(path: Path) -> bool:
    """Return true if a file is a comparison with a golden that failed."""
    if path.name != COMPARISON_FILE:
        return False
    found = read_if_whole(path, RecordedComparison)
    return found is not None and found.passed is False


def _mismatch(record: LogFile, table: Table) -> Root | None:
    """Return the cause of metrics that disagree, None if none do."""
    found = read_if_whole(record.path, RecordedComparison) or RecordedComparison()
    metrics = (metric for repeat in found.repeats for metric in repeat.comparisons)
    failed = [_text(metric) for metric in metrics if not metric.passed]
    if not failed:
        return None
    return Root(
        signature=table["golden_mismatch"],
        ranks=(),
        what=f"trained to the end, but its metrics disagree: {'; '.join(dict.fromkeys(failed))}",
        places=(_place(record, b'"passed": false', failed[0]),),
    )


def _text(found: RecordedMetric) -> str:
    step = "" if found.first_step is None else f" from step {found.first_step} on"
    return f"{found.metric}{step}"


def _with_fault(record: LogFile, root: Root, table: Table) -> Root:
    """Return a root cause with the first failure of the hardware in its place."""
    found = read_if_whole(record.path, RecordedHealthFile)
    if found is None or not found.faults:
        return root
    first = found.faults[0]
    row = next((row for row in table.signatures if row.id == first.signature), None)
    if row is None:
        return root
    place = _place(record, b'"faults"', first.text)
    return replace(root, signature=row, places=(place, *root.places), also=(first.text, *root.also))


def _place(record: LogFile, mark: bytes, text: str) -> LogLine:
    """Return the line of a record where a mark is."""
    try:
        offset = record.path.read_bytes().find(mark)
    except OSError:
        offset = 0
    return LogLine(log=record, offset=max(0, offset), text=text)


def record_of(path: Path, shown: str) -> LogFile:
    """Return a record as something that evidence can point to."""
    return LogFile(path=path, shown=shown, stream=Stream.LAUNCHER)


def known_of(unit: Unit) -> Known:
    """Return what `plan.json`, `triage.json` and `run.json` at or above a launch say of it."""
    plan_file = _above(unit.root, PLAN_FILE)
    if plan_file is None:
        return unit.known
    attempt = plan_file.parent
    known = unit.known
    plan = read_if_whole(plan_file, RecordedPlan)
    if plan is not None:
        known = replace(known, world_size=plan.world_size, limit_s=plan.time_limit_s)
    health = attempt / HEALTH_FILE
    if health.is_file():
        known = replace(known, record=record_of(health, str(health)))
    number = _phase_number(unit.root, attempt)
    diagnosed = _diagnosed(attempt, number)
    if diagnosed is not None:
        ended = next((end for end in End if end.value == diagnosed.ended), None)
        return replace(
            known, returncode=diagnosed.returncode, ended=ended, outlived=diagnosed.outlived
        )
    run = _above(attempt, RUN_FILE)
    return known if run is None else replace(known, returncode=_exit_code(run, attempt, number))


def _phase_number(directory: Path, attempt: Path) -> int:
    """Return the number of the phase that a directory is of."""
    parts = directory.resolve().relative_to(attempt.resolve()).parts
    name = parts[0] if parts else ""
    number = name.removeprefix("phase_")
    return int(number) if number.isdigit() else 1


def _diagnosed(attempt: Path, number: int) -> RecordedFailure | None:
    """Return the entry of the item's `triage.json` for one phase of an attempt."""
    where = f"{attempt.parent.name}/{attempt.name}"
    found = read_if_whole(attempt.parent.parent / TRIAGE_FILE, RecordedTriage)
    rows = () if found is None else found.attempts
    return next((r for r in rows if (r.attempt, r.phase_number) == (where, number)), None)


def _exit_code(run_file: Path, attempt: Path, number: int) -> int | None:
    """Return the exit code that `run.json` has of a phase; the run may have moved since."""
    run = read_if_whole(run_file, Result)
    items = () if run is None else run.items.values()
    for item in items:
        for row in item.attempts if isinstance(item, RecordedWorkload) else ():
            if Path(row.directory).parts[-3:] == attempt.parts[-3:]:
                return row.exit_codes[number - 1] if len(row.exit_codes) >= number else None
    return None


def _above(start: Path, name: str) -> Path | None:
    """Return a file in a directory or above it: a part of a run directory may be what was given."""
    directory = start.resolve()  # the parent of `..` is not what is before it
    for _ in range(_MOST_ABOVE):
        if (directory / name).is_file():
            return directory / name
        directory = directory.parent
    return None


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
    return path.name == ERROR_FILE or path.name in RECORDS or is_log(path)


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
    for directory in directories:
        rank = (directory_rank(directory) or 0) + local_size * (node_of(directory) or 0)
        for file in by_parent[directory]:
            if file.name == ERROR_FILE:
                errors[rank] = file
            elif is_log(file):
                log = LogFile(path=file, shown=name(file), rank=rank, stream=stream_of(file))
                logs.append(log)
    parent = directories[0].parent
    top, launchers = _launcher_logs(root, parent, loose, others)
    logs += [LogFile(path=file, shown=name(file), stream=Stream.LAUNCHER) for file in launchers]
    logs.sort(key=lambda log: (log.rank is None, log.rank or 0, log.shown))
    return Unit(name=name(top), root=top, logs=tuple(logs), error_files=errors)


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

"""The metrics of one phase, wherever its program wrote them: the one place that reads them.

What a row's `metrics` names is read while the program runs and at its end, by `Collector`, into one
file of the phase; progress, judgement and pages read that file, or else what the program wrote to
`$PYTEST_MEGATRON_METRICS` or `$TENSORBOARD_PATH` (`read_measured`).
"""

from __future__ import annotations

import fnmatch
import itertools
import os
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from pytest_megatron.base.files import read_end, read_json, write_json_atomically
from pytest_megatron.errors import GoldenError, MetricsError
from pytest_megatron.runs.layout import OWN_DIR, PhaseDirs
from pytest_megatron.workloads.golden.formats.curves import Curves, joined
from pytest_megatron.workloads.golden.formats.rows import (
    find_disagreement,
    read_printed,
    read_rows,
    rows_of,
)
from pytest_megatron.workloads.golden.formats.tensorboard import find_event_files, read_event_files
from pytest_megatron.workloads.golden.model import (
    MetricMap,
    Observed,
    is_loss,
    refuse_disagreements,
)
from pytest_megatron.workloads.golden.store import metrics_to_json, read_metrics
from pytest_megatron.workloads.recipe.metrics import LinePattern, MetricFormat, MetricSource

_PROBLEM = "_problem"
_TAIL_BYTES = 1 << 12
_PASSED_OVER = frozenset(("__pycache__", "node_modules", "site-packages", OWN_DIR.name, "venv"))
_MAGIC = frozenset("*?[")
_BAR = re.compile(r"\b(\d+)/(\d+) \[\d").findall
_BAR_BYTES, _FURTHER = 1 << 16, 1.5
_LAUNCHER = "launcher"


def has_measured(dirs: PhaseDirs) -> bool:
    """Return whether a phase has begun to write what it measures."""
    written = (dirs.collected, dirs.metrics_lines)
    return any(path.exists() for path in written) or bool(find_event_files(dirs.tensorboard))


def read_measured(dirs: PhaseDirs) -> Observed:
    """Return what a phase wrote so far.

    Raises:
        MetricsError: It wrote nothing, two places disagree, or one cannot be read.
    """
    if dirs.collected.exists():
        value = read_json(dirs.collected)
        problem = value.get(_PROBLEM) if isinstance(value, dict) else None
        if isinstance(problem, list):
            raise MetricsError(*map(str, problem))
        return read_metrics(dirs.collected)
    if not dirs.metrics_lines.exists():
        return read_metrics(dirs.tensorboard)
    found = read_metrics(dirs.metrics_lines)
    if find_event_files(dirs.tensorboard):
        other = read_metrics(dirs.tensorboard).metrics
        if (odd := find_disagreement(found.metrics, other)) is not None:
            name, step, here, there = odd
            raise MetricsError(
                str(dirs.metrics_lines),
                f"{name!r} is {here!r} at step {step}, and {there!r} in {dirs.tensorboard}; "
                f"expected the same value in both, write one of them",
            )
    return found


# A file as it was before the program started: its size, when it changed, checksum of its end.
_Mark: TypeAlias = tuple[int, int, int]


def _mark_of(path: Path) -> _Mark:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns, _tail_before(path, stat.st_size)


def _tail_before(path: Path, end: int) -> int:
    """Return a checksum of what a file has before an offset."""
    with path.open("rb") as file:
        file.seek(max(0, end - _TAIL_BYTES))
        return zlib.crc32(file.read(min(end, _TAIL_BYTES)))


@dataclass(slots=True)
class WatchedFiles:
    """The files below some directories that match a glob, and what a program adds to them.

    Attributes:
        root: Directory of the program.
        glob: `*` also matches a slash.
    """

    root: Path
    glob: str
    _before: dict[Path, _Mark] = field(default_factory=dict)

    def mark(self) -> None:
        """Remember the files that are there already."""
        for path in self._matching():
            try:
                self._before[path] = _mark_of(path)
            except OSError:  # it is gone, or not ours to read
                continue

    def narrowed(self, root: Path, glob: str) -> WatchedFiles:
        """Return the same files as far as they match another glob."""
        return WatchedFiles(root, glob, self._before)

    def changed(self) -> dict[Path, int]:
        """Return the files that are new, or changed, and the byte from which on they are."""
        return dict(self._changed())

    def _changed(self) -> Iterator[tuple[Path, int]]:
        """Yield files that are new or changed, and where the new part begins."""
        for path in sorted(self._matching()):
            size, changed_ns, tail = self._before.get(path, (0, 0, 0))
            try:
                stat = path.stat()
                if (stat.st_size, stat.st_mtime_ns) != (size, changed_ns):
                    is_longer = stat.st_size > size and _tail_before(path, size) == tail
                    yield path, size if is_longer else 0
            except OSError:
                continue

    def _matching(self) -> Iterator[Path]:
        """Yield the files that fit the glob."""
        whole = str(self.root / self.glob)
        globs = (whole, whole.replace("**/", ""))
        top = Path(*_fixed_parts(Path(whole)))
        for directory, below, names in os.walk(top if top.is_dir() else top.parent):
            below[:] = [name for name in below if _is_entered(Path(directory, name), top)]
            for name in names:
                path = Path(directory, name)
                if any(fnmatch.fnmatchcase(str(path), glob) for glob in globs) and path.is_file():
                    yield path


def _fixed_parts(path: Path) -> Iterator[str]:
    """Yield the parts of a glob up to the first with a pattern."""
    for part in path.parts:
        if _MAGIC & set(part):
            return
        yield part


def _is_entered(path: Path, top: Path) -> bool:
    is_passed_over = path.name in _PASSED_OVER or (path.name.startswith(".") and path != top)
    return not is_passed_over and not path.is_symlink() and not (path / "pyvenv.cfg").exists()


class Collector:
    """Reads the metrics of a running phase from the place that its row names.

    Create it before the program starts: what is there by then belongs to others.
    """

    def __init__(self, source: MetricSource, dirs: PhaseDirs, root: Path) -> None:
        self._source = source
        self._dirs = dirs
        self._files: WatchedFiles | None = None
        if source.path is not None:
            self._files = WatchedFiles(root, source.path)
            self._files.mark()

    def refresh(self, *, is_ended: bool = False) -> None:
        """Read all that is there, and write it to `PhaseDirs.collected`.

        Args:
            is_ended: Whether nothing more is going to be written: then a problem counts.
        """
        try:
            metrics = self._read()
        except (GoldenError, MetricsError, UnicodeDecodeError) as error:
            if is_ended:
                where = getattr(error, "where", str(self._source.path))
                problem = getattr(error, "problem", str(error))
                write_json_atomically(self._dirs.collected, {_PROBLEM: [where, problem]})
            return
        write_json_atomically(self._dirs.collected, metrics_to_json(metrics))

    def _read(self) -> MetricMap:
        """Return the metrics.

        Raises:
            MetricsError: There are none, a step has two values, or a file cannot be read.
        """
        source = self._source
        if self._files is None:
            assert source.lines is not None
            curves = read_logs(self._dirs, source.lines)
        else:
            assert source.form is not None
            curves = read_files(self._files, source.form, source.step)
        refuse_disagreements(curves.disagreements, source.names)
        if not len(curves):
            if self._files is None:
                problem = "no printed line matches metrics.pattern; look at the logs there"
                raise MetricsError(str(self._dirs.root), f"no metrics: {problem}")
            where = ", ".join(map(str, self._files.changed()))
            raise MetricsError(where, "no metrics: no row of it has a number")
        return curves.metrics


def read_logs(dirs: PhaseDirs, pattern: LinePattern) -> Curves:
    """Return the metrics that ranks printed, or the program where no rank of ours did."""
    logs = _logs_of_ranks(dirs)
    last = logs.pop(_LAUNCHER)
    parts = {where: read_printed(pattern, own) for where, own in logs.items()}
    if found := {where: part for where, part in parts.items() if len(part)}:
        return joined(found)
    return read_printed(pattern, last)


def read_files(files: WatchedFiles, form: MetricFormat, step: str | None) -> Curves:
    """Return the metrics of the files that changed.

    Raises:
        MetricsError: None did, or one cannot be read.
    """
    changed = files.changed()
    if not changed:
        where = str(files.root / files.glob)
        raise MetricsError(
            where, "no metrics: the program wrote no such file; metrics.path names it"
        )
    if form is MetricFormat.TENSORBOARD:
        return read_event_files(changed)
    return joined(
        {str(path): read_rows(rows_of(path, form, start), step) for path, start in changed.items()}
    )


def _logs_of_ranks(dirs: PhaseDirs) -> dict[str, list[Path]]:
    """Return the logs of each rank, in their order, and last that of a program without ranks."""
    ranks: dict[tuple[str, int], list[Path]] = {}
    for path in sorted(dirs.logs.rglob("std*.log")):
        if path.parent.name.isdigit():
            below = path.relative_to(dirs.logs).parts
            node = below[0] if below[0].startswith("node") else ""
            ranks.setdefault((node, int(path.parent.name)), []).append(path)
    found = {
        " ".join(filter(None, ("lines of", node, f"rank {rank}"))): own
        for (node, rank), own in sorted(ranks.items())
    }
    return {**found, _LAUNCHER: [dirs.launcher_log]}


def progress_bar(dirs: PhaseDirs, last: int) -> int | None:
    """Return how far the training's progress bar, as tqdm prints it, is; None without one.

    Args:
        dirs: The logs.
        last: The last step that is logged: a bar to that step, or a little further, is the one.
    """
    for log in itertools.chain.from_iterable(_logs_of_ranks(dirs).values()):
        said = read_end(log, _BAR_BYTES).decode(errors="replace") if log.is_file() else ""
        bars = _BAR(said)
        if found := [int(at) for at, end in bars if last <= int(end) < _FURTHER * last]:
            return found[-1]
    return None


def newest(metrics: MetricMap, names: tuple[str, ...]) -> tuple[int, str, float | str] | None:
    """Return the last step that any of some metrics has, and name and value of the loss there.

    Returns:
        None where none of them has a value yet.
    """
    found = [(metrics[name].steps[-1], name) for name in names if len(metrics.get(name, ()))]
    if not found:
        return None
    losses = [name for _, name in found if is_loss(name)]
    name = losses[0] if losses else found[0][1]
    return max(step for step, _ in found), name, metrics[name].values[-1]

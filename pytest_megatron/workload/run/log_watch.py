"""Reads logs while they are written: new lines, progress, a hang that NCCL reports."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pytest_megatron.runs.layout import PhaseDirs

_CHUNK_BYTES = 1 << 20  # of one file in one poll: a rank that floods its log cannot starve the rest
_ITERATION = re.compile(r"\biteration\s+(\d+)\s*/\s*(\d+)\s*\|")
_TIME_MS = re.compile(r"elapsed time per iteration \(ms\):\s*([\d.]+)")
_LOSS = re.compile(r"\blm loss:\s*([^\s|]+)")
# How torch.distributed.run marks a line that it copies from a rank.
_TEED = re.compile(r"\[default(\d+)\]:(?:\[rank\d+\]: ?)?(.*)")
# torch prints it when a collective did not finish; what follows only takes minutes. The name of
# the work behind it tells it from a program that speaks of watchdogs.
_WATCHDOG = "Watchdog caught collective operation timeout"
_WATCHDOG_LINE = re.compile(r"Watchdog caught collective operation timeout: Work\w*\(")
_SAYS_RANK = re.compile(r"\bRank (\d+)\]")
_LONGEST_LINE = 1 << 16  # of what has no end yet; the rest of a longer one is dropped
_LOOK_EVERY_S = 0.5  # for new files


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """One `iteration N/M | ...` line of a training.

    Attributes:
        iteration: The one that just ended, counted from 1.
        last: The one that the training was told to reach.
        loss: As printed, or None where the line has none.
        iteration_ms: Time of this iteration, or None.
    """

    iteration: int
    last: int
    loss: str | None = None
    iteration_ms: float | None = None

    @property
    def time_left_s(self) -> float | None:
        """Estimate from the latest iteration; None where its time is not known."""
        if self.iteration_ms is None:
            return None
        return (self.last - self.iteration) * self.iteration_ms / 1000


def parse_progress(line: str) -> Progress | None:
    """Read Megatron-LM's training line; None for every other line.

    Source: Megatron-LM megatron/training/training.py, training_log(), d98e8a64dd.
    """
    match = _ITERATION.search(line)
    if match is None:
        return None
    time = _TIME_MS.search(line)
    loss = _LOSS.search(line)
    return Progress(
        iteration=int(match[1]),
        last=int(match[2]),
        loss=None if loss is None else loss[1],
        iteration_ms=None if time is None else float(time[1]),
    )


@dataclass(slots=True)
class FollowedFile:
    """A log that grows."""

    path: Path
    _position: int = 0
    _rest: bytes = b""

    @property
    def num_bytes_read(self) -> int:
        """How much of the file was seen."""
        return self._position

    def new_lines(self) -> Iterator[str]:
        """Yield the lines completed since the last call."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._position)
                chunk = file.read(_CHUNK_BYTES)
        except OSError:  # not there yet
            return
        self._position += len(chunk)
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        self._rest = self._rest[:_LONGEST_LINE]
        for line in lines:
            yield line.decode(errors="replace").rstrip("\r")

    def last_line(self) -> str:
        """Return what stands behind the last end of a line."""
        return self._rest.decode(errors="replace").rstrip("\r")


@dataclass(slots=True)
class LogWatch:
    """Follows every log of one phase, each line once.

    Attributes:
        ranks_per_node: Logs of several nodes lie in `node<i>/`, by local rank.
        scripts: Where a script of the recipe may have its own ranks log, or None.
        progress: The furthest that any rank printed, or None.
        hung_rank: The rank whose watchdog reported a collective that did not finish, or None.
    """

    dirs: PhaseDirs
    ranks_per_node: int = 1
    scripts: Path | None = None
    progress: Progress | None = None
    hung_rank: int | None = None
    _launcher: FollowedFile = field(init=False)
    _ranks: dict[Path, FollowedFile] = field(default_factory=dict)
    _look_again_at: float = 0.0

    def __post_init__(self) -> None:
        self._launcher = FollowedFile(self.dirs.launcher_log)

    def poll(self) -> list[str]:
        """Take in what is new; return the new lines of tee'd ranks, as `[rank0]: ...`."""
        if time.monotonic() >= self._look_again_at:
            self._look()
        for path, followed in self._ranks.items():
            rank = int(path.parent.name)
            if self.dirs.logs in path.parents:
                rank += self.dirs.first_rank_below(path, self.ranks_per_node)
            for line in followed.new_lines():
                self._take(line, rank=rank)
        shown = []
        for line in self._launcher.new_lines():
            tee = _TEED.match(line)
            self._note_watchdog(line, None if tee is None else int(tee[1]))
            if tee is not None:
                shown.append(f"[rank{tee[1]}]: {tee[2]}")
        return shown

    def drain(self) -> list[str]:
        """Take in everything that is there: for the end, when nothing more is written."""
        lines: list[str] = []
        self._look()
        while True:
            before = self._num_bytes_read()
            lines += self.poll()
            if self._num_bytes_read() == before:
                return lines

    def _num_bytes_read(self) -> int:
        return sum(f.num_bytes_read for f in (self._launcher, *self._ranks.values()))

    def _look(self) -> None:
        """Find the logs of ranks that have started since."""
        self._look_again_at = time.monotonic() + _LOOK_EVERY_S
        found = [*self.dirs.logs.glob("**/attempt_*/*/std*.log")]
        if self.scripts is not None:
            found += self.scripts.glob("**/attempt_*/*/std*.log")
        for path in found:
            if path.parent.name.isdigit():
                self._ranks.setdefault(path, FollowedFile(path))

    def _take(self, line: str, *, rank: int) -> None:
        self._note_watchdog(line, rank)
        progress = parse_progress(line) if "iteration" in line else None
        if progress is not None:
            self.progress = progress

    def _note_watchdog(self, line: str, rank: int | None) -> None:
        """Remember the rank of a watchdog's report, which may stand in a log of no rank."""
        if self.hung_rank is not None or _WATCHDOG not in line:
            return
        if _WATCHDOG_LINE.search(line):
            said = _SAYS_RANK.search(line)
            self.hung_rank = int(said[1]) if rank is None and said is not None else rank or 0

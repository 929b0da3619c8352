"""One execution of an item on a gang, and what it asks pytest itself to do."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from pytest_megatron.gang.logs import file_size, read_piece
from pytest_megatron.gang.spec import RunEnd
from pytest_megatron.report.merge import Merged
from pytest_megatron.report.phase import has_reported

_NUM_LAST_LINES = 40  # a traceback of an exception, or the stacks of one that was aborted


@dataclass(slots=True)
class Execution:
    """One item while it runs, and when it has run.

    Attributes:
        index: Of the item among the session's.
        before: What the same gang ran before it, if anything.
        log_starts: Where stderr of each rank stood, where that may matter.
        end: How it ended on the gang; None while it runs.
        merged: One report of all ranks for each phase and subtest.
    """

    index: int
    item: pytest.Item
    before: pytest.Item | None
    log_starts: Sequence[int] = ()
    end: RunEnd | None = None
    merged: tuple[Merged, ...] = ()

    @property
    def ended(self) -> RunEnd:
        """How it ended, of one that has."""
        assert self.end is not None
        return self.end

    @property
    def may_end_session(self) -> bool:
        """Whether it has to be reported before anything new starts."""
        stops = [r.done.stop for r in self.end.ranks if r.done] if self.end else []
        return any(stops) or any(m.outcome == "failed" for m in self.merged)

    def phase(self, when: str) -> Merged:
        """Return the report of a phase; subtests come before their call."""
        return [m for m in self.merged if m.when == when][-1]

    def log_lines(self) -> list[str]:
        """Return what its ranks wrote to stderr meanwhile."""
        return [line for lines in self._lines_by_rank().values() for line in lines]

    def last_words(self) -> list[str]:
        """Return the end of what its ranks that died by themselves wrote to stderr.

        Not of those that were killed by SIGKILL: who did it left no text there.
        """
        dead = {r.rank for r in self.ended.ranks if r.exit_code not in (None, -signal.SIGKILL)}
        found = self._lines_by_rank()
        return [line for rank in dead for line in found.get(rank, [])[-_NUM_LAST_LINES:]]

    def _lines_by_rank(self) -> dict[int, list[str]]:
        found: dict[int, list[str]] = {}
        for rank, start in zip(self.ended.ranks, self.log_starts, strict=True):
            path = Path(rank.log_dir, "stderr.log")
            found[rank.rank] = read_piece(path, start, file_size(path)).splitlines()
        return found

    def stop_like_rank(self, when: str) -> None:
        """End the session as the test asked pytest to, by `pytest.exit` or KeyboardInterrupt.

        It ends in the first phase that the rank did not report; those before it count.
        """
        end = self.ended
        for rank in end.ranks:
            stop: Sequence[object] = () if rank.done is None else rank.done.stop
            if not stop or has_reported(rank, when):
                continue
            where = f"rank {rank.rank} of {len(end.ranks)} in {self.item.nodeid}"
            if stop[0] == "exit":
                code = stop[2] if isinstance(stop[2], int) else None
                raise pytest.exit.Exception(f"{stop[1]} ({where})", code)
            raise KeyboardInterrupt(where)

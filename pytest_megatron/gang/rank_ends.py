"""What a rank shares with its fork server, and with other ranks that come from the same one."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from pytest_megatron.gang.lockstep import Lockstep
from pytest_megatron.gang.originals import mmap, os

NOTE_BYTES = 1024  # the phase is a node id while a rank collects
_RUN = struct.Struct("Q")


def read_note(note: bytes) -> tuple[int, str]:
    """Return the number of the execution and the phase that a rank noted."""
    (run,) = _RUN.unpack_from(note)
    return run, note[_RUN.size :].decode(errors="replace").strip("\0 ")


@dataclass(slots=True)
class RankPipes:
    """Descriptors that a rank shares with its fork server.

    Attributes:
        trigger: Read end of a pipe; a byte in it asks for NCCL's flight recorder.
        notes: A file in memory in which the rank notes which execution it began last, and the
            phase that it is in; closed by the first note.
        lockstep: What all ranks of the gang share, where this fork server forks all of them.
    """

    trigger: int
    notes: int
    lockstep: Lockstep | None = None
    _page: mmap.mmap | None = None

    def begin_run(self, run: int) -> None:
        """Note that an execution begins here: a rank that dies from now on dies in it."""
        self._open()[: _RUN.size] = _RUN.pack(run)

    def note(self, when: str) -> None:
        """Note the phase; costs less than a microsecond, and survives the rank."""
        size = NOTE_BYTES - _RUN.size
        self._open()[_RUN.size :] = when.encode()[:size].ljust(size, b"\0")

    def _open(self) -> mmap.mmap:
        if self._page is None:
            self._page = mmap.mmap(self.notes, NOTE_BYTES)  # has a descriptor of its own
            os.close(self.notes)
        return self._page

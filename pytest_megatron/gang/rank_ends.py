"""What a rank shares with its nursery, and with other ranks that come from the same one."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

from pytest_megatron.gang.lockstep import Lockstep

PHASE_BYTES = 1024  # a node id while a rank collects


@dataclass(slots=True)
class RankEnds:
    """Descriptors that a rank shares with its nursery.

    Attributes:
        trigger: Read end of a pipe; a byte in it asks for NCCL's flight recorder.
        phase: A file in memory in which the rank notes the phase of a test that it is in; closed
            by the first note.
        lockstep: What all ranks of the gang share, where this nursery forks all of them.
    """

    trigger: int
    phase: int
    lockstep: Lockstep | None = None
    _page: mmap.mmap | None = None

    def note(self, when: str) -> None:
        """Note the phase; costs less than a microsecond, and survives the rank."""
        if self._page is None:
            self._page = mmap.mmap(self.phase, PHASE_BYTES)  # has a descriptor of its own
            os.close(self.phase)
        self._page[:] = when.encode()[:PHASE_BYTES].ljust(PHASE_BYTES, b"\0")

"""How the ranks of one gang agree to go on to the next test without asking the controller.

Every rank says in shared memory how it ended a test. If all did so in the same way (each passed,
all took part in the same collectives, what was sent was received), the test that the controller
sent ahead may start; in any other case it is dropped, and the controller decides. Only for ranks
that one fork server forks, as they inherit memory and descriptors.
"""

from __future__ import annotations

import contextlib
import struct
from dataclasses import dataclass

from pytest_megatron.gang.originals import mmap, os, select, time

_WORD_BYTES = 8
_RUN_SHIFT = 40
_COLLECTIVES_SHIFT = 20
_COLLECTIVES_MASK = (1 << 20) - 1  # of larger numbers the lower bits differ if they do
_UNMATCHED_SHIFT = 9
_UNMATCHED_MASK = (1 << 11) - 1
_RENDEZVOUS_MASK = (1 << 8) - 1
_SHORTEST_MS, _LONGEST_MS = 2, 50  # between looks, should a wake-up be lost


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a rank ended a test.

    Attributes:
        run: Number of the execution, in at most 24 bits.
        is_clean: Whether every phase passed and nothing forbids to go on.
        num_collectives: As in `Done`.
        num_rendezvous: As in `Done`.
        num_unmatched: As in `Done`.
    """

    run: int
    is_clean: bool
    num_collectives: int
    num_rendezvous: int
    num_unmatched: int = 0

    @property
    def word(self) -> int:
        """All of it in 64 bits, which are written at once."""
        return (
            self.run << _RUN_SHIFT
            | (self.num_collectives & _COLLECTIVES_MASK) << _COLLECTIVES_SHIFT
            | (self.num_unmatched & _UNMATCHED_MASK) << _UNMATCHED_SHIFT
            | (self.num_rendezvous & _RENDEZVOUS_MASK) << 1
            | self.is_clean
        )


class Lockstep:
    """What the ranks of a gang share; made before they are forked (effects)."""

    def __init__(self, world_size: int) -> None:
        """Get memory and a descriptor for each rank."""
        self._memory = mmap.mmap(-1, world_size * _WORD_BYTES)
        self._words = memoryview(self._memory).cast("Q")
        self._bells = [os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(world_size)]
        self._last: Ending | None = None

    def publish(self, rank: int, ending: Ending) -> None:
        """Say how a rank ended a test, and wake those that wait for it."""
        self._last = ending
        self._words[rank] = ending.word
        has_all = all(word >> _RUN_SHIFT >= ending.run for word in self._words)
        if has_all or not ending.is_clean:
            for other, bell in enumerate(self._bells):
                if other != rank:
                    with contextlib.suppress(OSError):  # a test closed it: others look by the clock
                        os.eventfd_write(bell, 1)

    def may_start(self, rank: int, run: int, after: int) -> bool:
        """Wait until all ranks ended `after`, and return whether `run` may start.

        A rank that died or hangs is not waited out here: the controller kills the gang.
        """
        own = self._last
        if own is None or own.run != after or not own.is_clean:
            return False
        wait_ms = _SHORTEST_MS
        while True:
            are_late = has_agreed = False
            num_unmatched = 0
            for word in self._words:
                number = word >> _RUN_SHIFT
                if number < after:
                    are_late = True
                elif number == run:
                    has_agreed = True  # else it had not run that
                elif _without_unmatched(word) != _without_unmatched(own.word):
                    return False
                num_unmatched += word >> _UNMATCHED_SHIFT & _UNMATCHED_MASK
            if not are_late:
                return has_agreed or num_unmatched & _UNMATCHED_MASK == 0
            self._wait(self._bells[rank], wait_ms)
            wait_ms = min(2 * wait_ms, _LONGEST_MS)

    def _wait(self, bell: int, wait_ms: int) -> None:
        poll = select.poll()
        poll.register(bell, select.POLLIN)
        try:
            if poll.poll(wait_ms):
                os.eventfd_read(bell)
        except OSError:  # a test closed it
            time.sleep(wait_ms / 1000)

    def close(self) -> None:
        """Let go of it in the process that forked the ranks."""
        self._words.release()
        self._memory.close()
        for bell in self._bells:
            os.close(bell)


def _without_unmatched(word: int) -> int:
    """Return what has to be equal in all ranks."""
    return word & ~(_UNMATCHED_MASK << _UNMATCHED_SHIFT)


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

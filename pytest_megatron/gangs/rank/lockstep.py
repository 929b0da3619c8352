"""Agreement of the ranks of one gang to start the next test without the controller.

Every rank publishes its end of a test in shared memory. If all agree (each passed, all entered the
same collectives, every send was received), the test that the controller sent ahead may start;
otherwise it is dropped, and the controller decides. Only for ranks that one agent forks, as they
inherit memory and descriptors.

What it gains: one more trivial test, in ms, with it, without it and under `torch.distributed.run -m
pytest`, in turns on a host with 2x NVIDIA H200 and torch 2.11 (40 and 1,240 tests of
`benchmarks/gangs.py`): gloo on two cores, two ranks 3.9, 3.4 and 3.5, four ranks 7.9, 9.4 and 9.1;
gloo on 32 cores, two ranks 2.1, 2.9 and 1.8; NCCL, two ranks 2.2, 2.3 and 0.6. Without it, one more
test costs more than under torchrun in three of the four, so it stays.
"""

from __future__ import annotations

import contextlib
import struct
from dataclasses import dataclass

from pytest_megatron.gangs.ipc.messages import Done
from pytest_megatron.process.originals import mmap, os, select, time

_WORD_BYTES = 8
_RUN_SHIFT = 40
_COLLECTIVES_SHIFT = 20
_COLLECTIVES_MASK = (1 << 20) - 1  # lower bits of larger numbers
_UNMATCHED_SHIFT = 9
_UNMATCHED_MASK = (1 << 11) - 1
_RENDEZVOUS_MASK = (1 << 8) - 1
_SHORTEST_MS, _LONGEST_MS = 2, 50  # between polls, in case a wake-up is lost
_NUM_YIELDS = 40  # before a rank sleeps: most ranks end a test at nearly the same time


def _word_of(done: Done) -> int:
    """Return the end of a test in 64 bits, which are written atomically.

    Args:
        done: End of an execution whose number has at most 24 bits.
    """
    return (
        done.run << _RUN_SHIFT
        | (done.num_collectives & _COLLECTIVES_MASK) << _COLLECTIVES_SHIFT
        | (done.num_unmatched & _UNMATCHED_MASK) << _UNMATCHED_SHIFT
        | (done.num_rendezvous & _RENDEZVOUS_MASK) << 1
        | done.is_clean
    )


class Lockstep:
    """Shared memory and event descriptors of a gang; created before its ranks (effects)."""

    def __init__(self, world_size: int) -> None:
        """Allocate memory and a descriptor for each rank."""
        self._memory = mmap.mmap(-1, 2 * world_size * _WORD_BYTES)
        words = memoryview(self._memory).cast("Q")
        self._words, self._is_asleep = words[:world_size], words[world_size:]
        self._bells = [os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(world_size)]
        self._last = 0  # word of this rank

    def publish(self, rank: int, done: Done) -> None:
        """Publish the end of a test on a rank, and wake the ranks that sleep until it."""
        self._words[rank] = self._last = _word_of(done)
        has_all = all(word >> _RUN_SHIFT >= done.run for word in self._words)
        if has_all or not done.is_clean:
            for other, bell in enumerate(self._bells):
                if other != rank and self._is_asleep[other]:
                    with contextlib.suppress(OSError):  # a test closed it: others poll
                        os.eventfd_write(bell, 1)

    def may_start(self, rank: int, run: int, after: int) -> bool:
        """Wait until all ranks ended `after`, and return whether `run` may start.

        There is no time limit: if a rank died or hangs, the controller kills the gang.
        """
        own = self._last
        if own >> _RUN_SHIFT != after or not own & 1:
            return False
        wait_ms, num_looks = _SHORTEST_MS, 0
        while (answer := self._agreed(own, run, after)) is None:
            num_looks += 1
            if num_looks < _NUM_YIELDS:
                os.sched_yield()
            elif num_looks == _NUM_YIELDS:
                self._is_asleep[rank] = 1  # and looks once more
            else:
                self._wait(self._bells[rank], wait_ms)
                wait_ms = min(2 * wait_ms, _LONGEST_MS)
        self._is_asleep[rank] = 0
        return answer

    def _agreed(self, own: int, run: int, after: int) -> bool | None:
        """Return whether all ranks agree to start `run`; None while one has not ended `after`."""
        are_late = has_agreed = False
        num_unmatched = 0
        for word in self._words:
            number = word >> _RUN_SHIFT
            if number < after:
                are_late = True
            elif number == run:
                has_agreed = True  # it started `run` only after agreeing
            elif _without_unmatched(word) != _without_unmatched(own):
                return False
            num_unmatched += word >> _UNMATCHED_SHIFT & _UNMATCHED_MASK
        if are_late:
            return None
        return has_agreed or num_unmatched & _UNMATCHED_MASK == 0

    def _wait(self, bell: int, wait_ms: int) -> None:
        """Wait until another rank rings the bell, or a time is over."""
        poll = select.poll()
        poll.register(bell, select.POLLIN)
        try:
            if poll.poll(wait_ms):
                os.eventfd_read(bell)
        except OSError:  # a test closed it
            time.sleep(wait_ms / 1000)

    def close(self) -> None:
        """Close the shared memory in the process that forked the ranks."""
        self._words.release()
        self._is_asleep.release()
        self._memory.close()
        for bell in self._bells:
            os.close(bell)


def _without_unmatched(word: int) -> int:
    """Return the part of a word that has to be equal on all ranks."""
    return word & ~(_UNMATCHED_MASK << _UNMATCHED_SHIFT)


NOTE_BYTES = 1024  # the phase is a node id while a rank collects
_RUN = struct.Struct("Q")


def read_note(note: bytes) -> tuple[int, str]:
    """Return the number of the execution and the phase that a rank has written."""
    (run,) = _RUN.unpack_from(note)
    return run, note[_RUN.size :].decode(errors="replace").strip("\0 ")


@dataclass(slots=True)
class RankPipes:
    """Descriptors that a rank shares with its agent.

    Attributes:
        connection: The rank's end of their pair of sockets.
        trigger: Read end of a pipe; a byte in it requests NCCL's flight record.
        notes: A file in memory in which the rank writes its last execution and its current
            phase; closed by the first write.
        lockstep: Shared by all ranks of the gang, if one agent forks all of them.
    """

    connection: int
    trigger: int
    notes: int
    lockstep: Lockstep | None = None
    _page: mmap.mmap | None = None

    def begin_run(self, run: int) -> None:
        """Write the number of an execution that begins, in case the rank dies in it."""
        self._open()[: _RUN.size] = _RUN.pack(run)

    def note(self, when: str) -> None:
        """Write the phase, which survives the rank; takes less than a microsecond."""
        size = NOTE_BYTES - _RUN.size
        self._open()[_RUN.size :] = when.encode()[:size].ljust(size, b"\0")

    def _open(self) -> mmap.mmap:
        """Return the page of memory that this rank shares with its agent."""
        if self._page is None:
            self._page = mmap.mmap(self.notes, NOTE_BYTES)  # has a descriptor of its own
            os.close(self.notes)
        return self._page

"""Misbehave on purpose, so that the harness can be tested with a real training run that fails.

`--fault KIND@ITERATION[:RANK]` makes one rank (without RANK: every rank) do one bad thing at the
start of an iteration, counted from 1:

- `crash` raises an exception; `exit0` ends early with exit code 0, as if all were well;
- `kill` and `segfault` die of SIGKILL and SIGSEGV, without a word in the log;
- `hang` waits for ever, so that the other ranks wait for it in their next collective;
- `nan` makes the loss NaN at that iteration;
- `silent` (the iteration is not used: write `silent@0`) trains but writes no TensorBoard events.

Must not be imported by anything but the training program and its tests.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What goes wrong."""

    CRASH = "crash"
    EXIT0 = "exit0"
    HANG = "hang"
    KILL = "kill"
    NAN = "nan"
    SEGFAULT = "segfault"
    SILENT = "silent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that goes wrong, once.

    Attributes:
        iteration: Counted from 1.
        rank: The rank it happens on; None is every rank.
    """

    kind: Kind
    iteration: int
    rank: int | None = None

    def is_at(self, kind: Kind, iteration: int, rank: int) -> bool:
        """Whether `kind` goes wrong at this iteration on this rank."""
        return self.kind is kind and self.iteration == iteration and self.concerns(rank)

    def concerns(self, rank: int) -> bool:
        """Whether this rank is one that misbehaves."""
        return self.rank is None or self.rank == rank


def parse_fault(text: str) -> Fault:
    """Read `KIND@ITERATION[:RANK]`.

    Raises:
        ValueError: It is not of that form; the message says what is.
    """
    kinds = sorted(kind.value for kind in Kind)
    found = re.fullmatch(r"(?P<kind>\w+)@(?P<iteration>\d+)(:(?P<rank>\d+))?", text)
    if found is None or found["kind"] not in kinds:
        raise ValueError(
            f"--fault: {text!r} is not KIND@ITERATION[:RANK] with a KIND of {', '.join(kinds)}"
        )
    return Fault(
        kind=Kind(found["kind"]),
        iteration=int(found["iteration"]),
        rank=None if found["rank"] is None else int(found["rank"]),
    )


def misbehave(fault: Fault | None, iteration: int, rank: int) -> None:
    """Do the bad thing if it is due; called by every rank at the start of every iteration.

    Raises:
        RuntimeError: A crash is due.
        SystemExit: An early end is due.
    """
    if fault is None or not fault.is_at(fault.kind, iteration, rank):
        return
    where = f"fault {fault.kind.value} of rank {rank} at iteration {iteration}"
    match fault.kind:
        case Kind.CRASH:
            raise RuntimeError(where)
        case Kind.EXIT0:
            sys.exit(0)
        case Kind.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        case Kind.SEGFAULT:
            os.kill(os.getpid(), signal.SIGSEGV)
        case Kind.HANG:
            while True:
                signal.pause()
        case Kind.NAN | Kind.SILENT:
            pass  # the training loop asks for these where they take effect

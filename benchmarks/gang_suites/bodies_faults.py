"""What the last rank does wrong in one test, for `gang_faults.py`; and who came to the end."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

FAULT, _, WHEN = os.environ.get("BENCH_FAULT", "").partition("_")
STRUCK = 4
LIMIT_S = 10.0


def group_timeout() -> timedelta | None:
    """Return the time limit of a process group: the one that rivals have; None is torch's."""
    return timedelta(seconds=LIMIT_S) if FAULT else None


def strike(number: int, rank: int, world_size: int, when: str) -> bool:
    """Do what is wrong, if it is time; return whether to leave the test at once."""
    if number != STRUCK or rank != world_size - 1 or when != WHEN:
        return False
    match FAULT:
        case "assert":
            raise AssertionError("struck")
        case "skip":
            pytest.skip("struck")
        case "sysexit0":
            sys.exit(0)
        case "exit0" | "exit1":
            os._exit(int(FAULT[-1]))
        case "segv":
            ctypes.string_at(0)
        case "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "sleep":
            time.sleep(100_000)
        case "extra":
            dist.all_reduce(torch.ones(4))
        case _:
            pass
    return FAULT == "missed"


def note_end(number: int, rank: int) -> None:
    """Note that a rank came to the end of a test."""
    with Path(os.environ["BENCH_ENDS"]).open("a", encoding="utf-8") as file:
        file.write(f"{number} {rank}\n")

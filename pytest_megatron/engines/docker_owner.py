"""Whose a container is: labels, and whether the process that they name still runs.

Reads `/proc` of this machine; knows nothing of Docker.
"""

from __future__ import annotations

import os
from pathlib import Path

LABEL_OWNER = "pytest-megatron.owner"
LABEL_KEY = "pytest-megatron.key"
LABEL_RUN = "pytest-megatron.run"
_START_FIELD = 19  # of those behind the name in /proc/PID/stat: clock ticks from boot to start
_PARTS = 4


def owner() -> str:
    """Return this process as a label has it; no other process of any machine has the same."""
    return "/".join((*_machine(), str(os.getpid()), _started(os.getpid()) or ""))


def is_dead(label: str) -> bool:
    """Whether the process of a label has ended; False where this process cannot know.

    Args:
        label: As `owner` returned it, maybe on another machine or in another container.
    """
    parts = label.split("/")
    if len(parts) != _PARTS or tuple(parts[:2]) != _machine() or not parts[2].isdigit():
        return False
    return _started(int(parts[2])) != parts[3]


def _machine() -> tuple[str, str]:
    """Return names of this start of the machine and of its processes as this one sees them."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return boot, str(Path("/proc/self/ns/pid").readlink())


def _started(pid: int) -> str | None:
    """Return when a process started; None where there is none, or only what is left of one."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    state, *rest = stat.rpartition(")")[2].split()  # a name may hold anything
    return None if state in "ZX" else rest[_START_FIELD - 1]

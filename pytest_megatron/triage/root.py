"""What a failure began with. Data."""

from __future__ import annotations

from dataclasses import dataclass

from pytest_megatron.triage.signature import Signature
from pytest_megatron.triage.story import LogLine


@dataclass(frozen=True, slots=True, kw_only=True)
class Root:
    """What a failure began with.

    Attributes:
        ranks: Those that failed by themselves in the same way, lowest first; empty if it was none,
            or nothing says which.
        what: What that rank did, for a sentence: `raised ValueError: x`, `was killed by SIGKILL`.
        places: Lines that show it.
        frame: `file:line in name` where it happened, or None.
        frames: Of its traceback.
        message: What it raised, whole, or None.
        is_all: Whether every rank failed in this way.
        also: Sentences about what else is known, such as which collective a rank missed.
    """

    signature: Signature
    ranks: tuple[int, ...]
    what: str
    places: tuple[LogLine, ...] = ()
    frame: str | None = None
    frames: tuple[str, ...] = ()
    message: str | None = None
    is_all: bool = False
    also: tuple[str, ...] = ()

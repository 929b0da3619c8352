"""What a rank's debugger and the terminal say, as frozen types: see `gang.messages`."""

from __future__ import annotations

from dataclasses import dataclass

INTERRUPTED_LINE = "\x03"  # what a `DebuggerLine` holds where the user pressed Ctrl-C


@dataclass(frozen=True, slots=True, kw_only=True)
class DebuggerWanted:
    """A rank would enter the debugger and waits for leave.

    Attributes:
        reason: `exception` or `breakpoint`.
    """

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DebuggerWrote:
    """The debugger of a rank printed something."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DebuggerReads:
    """The debugger of a rank wants a line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DebuggerLeft:
    """The debugger of a rank ended; the test goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DebuggerAnswer:
    """Whether a rank may enter the debugger."""

    may_enter: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DebuggerLine:
    """A line that the user typed; empty at the end of input."""

    text: str

"""Pytest's debugger in a rank, with permission of the controller, at its terminal.

Active in ranks. `--pdb`, `--trace`, `breakpoint()` and `pytest.set_trace()` all call
`pytestPDB._init_pdb`, which is replaced here; a rank without permission continues at once.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
from collections.abc import Callable, Generator, Sequence
from typing import IO, TextIO, cast

import pytest
from _pytest.debugging import PdbInvoke, pytestPDB
from typing_extensions import override

from pytest_megatron.gangs.ipc.channel import Channel
from pytest_megatron.gangs.ipc.messages import DebuggerAnswer, DebuggerLeft, DebuggerWanted
from pytest_megatron.process.originals import os, threading

_INVOKE, _INIT_PDB = "pdbinvoke", "_init_pdb"  # names of pytest


class Printed:
    """Replaces pytest's terminal in a rank, and keeps the text.

    Attributes:
        diverted: Stream for the text while a debugger is open.
    """

    def __init__(self) -> None:
        self.diverted: IO[str] | None = None
        self._parts: list[str] = []

    def write(self, text: str) -> int:
        """Keep a text, or pass it on while output is diverted."""
        if self.diverted is not None:
            return self.diverted.write(text)
        self._parts.append(text)
        return len(text)

    def flush(self) -> None:
        """Flush what output is diverted to."""
        if self.diverted is not None:
            self.diverted.flush()

    def isatty(self) -> bool:
        """Return false, so that there are no colours."""
        return False

    @contextlib.contextmanager
    def nothing(self) -> Generator[None]:
        """Drop what is written meanwhile."""
        num_parts = len(self._parts)
        try:
            yield
        finally:
            del self._parts[num_parts:]

    def take(self) -> str:
        """Return what was printed since the last call."""
        text = "".join(self._parts)
        self._parts.clear()
        return text


class RankDebugger:
    """Debugger of this rank; the controller decides which rank may stop.

    Attributes:
        channel: To the controller.
    """

    channel: Channel

    def __init__(self, terminal: Printed) -> None:
        self._printed = terminal
        self._pid = 0
        self._invoke: PdbInvoke | None = None
        self._streams: tuple[TextIO, TextIO] | None = None
        self._terminal = cast("TextIO", _Terminal(self))
        self.descriptors: Sequence[int] = ()  # of the terminal: input and output

    def begin(self, channel: Channel) -> None:
        """Set the channel of this process, which is a rank now."""
        self.channel = channel
        self._pid = os.getpid()

    def install(self, config: pytest.Config) -> None:
        """Replace pytest's entry points of the debugger."""
        manager = config.pluginmanager
        if manager.has_plugin(_INVOKE):
            self._invoke = cast("PdbInvoke", manager.unregister(name=_INVOKE))
        capture = manager.get_plugin("capturemanager")
        original = getattr(pytestPDB, _INIT_PDB)  # called by every way into the debugger

        def make_debugger(method: str, *args: object, **settings: object) -> object:
            """Return the debugger, or one that does nothing if it may not stop."""
            if not self.is_or_gets_open():
                return _NoDebugger()
            if capture is not None:
                capture.suspend(in_=True)
            self._take_streams()  # pytest prints a headline
            debugger = original(method, *args, **settings)
            self._take_streams()  # a fixture that captures has restored its own
            debugger.use_rawinput, debugger.nosigint = False, True
            debugger.stdin = debugger.stdout = self._terminal
            return debugger

        setattr(pytestPDB, _INIT_PDB, make_debugger)

    @property
    def is_open(self) -> bool:
        """True if this rank has permission."""
        return self._streams is not None

    def is_or_gets_open(self) -> bool:
        """Return whether the debugger is open, after a request for permission if necessary."""
        return self.is_open or self.open("breakpoint")

    def open(self, reason: str) -> bool:
        """Request permission; return whether it was granted."""
        if os.getpid() != self._pid or threading.current_thread() is not threading.main_thread():
            return False  # only the main thread uses the channel
        self.channel.send(DebuggerWanted(reason=reason, pid=self._pid))
        answer, self.descriptors = self.channel.receive_with_descriptors()
        if not (isinstance(answer, DebuggerAnswer) and answer.may_enter):
            self.channel.send(DebuggerLeft())
            return False
        self._streams = sys.stdin, sys.stdout
        self._printed.diverted = self._terminal
        return True

    def close(self) -> None:
        """Return the permission, if there is one."""
        if self._streams is None:
            return
        self._terminal.flush()
        for descriptor in self.descriptors:
            os.close(descriptor)
        sys.stdin, sys.stdout = self._streams
        self._streams = self._printed.diverted = None
        self.channel.send(DebuggerLeft())

    @pytest.hookimpl(tryfirst=True)
    def pytest_exception_interact(
        self,
        node: pytest.Item | pytest.Collector,
        call: pytest.CallInfo[object],
        report: pytest.TestReport,
    ) -> None:
        """Open the debugger at a failure, with `--pdb`."""
        if self._invoke is None or not self.open("exception"):
            return
        try:
            self._invoke.pytest_exception_interact(node=node, call=call, report=report)
        finally:
            self.close()

    def pytest_leave_pdb(self) -> None:
        """Return the permission at `continue`; a later breakpoint requests it again."""
        self.close()

    def _take_streams(self) -> None:
        sys.stdin = sys.stdout = self._terminal


class _NoDebugger:
    """Debugger of ranks that may not stop."""

    quitting = False

    def set_trace(self, frame: object = None) -> None:
        """Continue."""

    def runcall(self, function: Callable[[], object]) -> object:
        """Run the test."""
        return function()


class _Terminal(io.TextIOBase):
    """Reads from the user's terminal, and writes to it line by line."""

    encoding = "utf-8"

    def __init__(self, debugger: RankDebugger) -> None:
        self._debugger = debugger
        self._line = ""  # that has not ended yet

    @override
    def readable(self) -> bool:
        return True

    @override
    def writable(self) -> bool:
        return True

    @override
    def write(self, text: str, /) -> int:
        lines, newline, self._line = (self._line + text).rpartition("\n")
        self._show(lines + newline)
        return len(text)

    def _show(self, text: str) -> None:
        if text and self._debugger.is_or_gets_open():
            content = text.encode(errors="replace")
            while content:
                content = content[os.write(self._debugger.descriptors[1], content) :]

    @override
    def readline(self, size: int | None = -1, /) -> str:  # type: ignore[override]
        """Return a line; empty at the end of input."""
        if not self._debugger.is_or_gets_open():
            return ""
        prompt, self._line = self._line, ""
        if os.isatty(self._debugger.descriptors[0]):
            return self._edit_line(prompt)
        self._show(prompt)
        with io.FileIO(self._debugger.descriptors[0], closefd=False) as file:
            return file.readline().decode(errors="replace")  # and nothing that follows

    def _edit_line(self, prompt: str) -> str:
        """Let the user edit a line with readline, which knows 0 and 1 only."""
        with contextlib.suppress(ImportError):
            importlib.import_module("readline")
        kept = [os.dup(number) for number in (0, 1)]
        streams = sys.stdin, sys.stdout
        for number, descriptor in enumerate(self._debugger.descriptors):
            os.dup2(descriptor, number)
        try:
            sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False))
            sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False))
            return input(prompt) + "\n"
        except EOFError:
            return ""
        finally:
            sys.stdin, sys.stdout = streams
            for number, descriptor in enumerate(kept):
                os.dup2(descriptor, number)
                os.close(descriptor)

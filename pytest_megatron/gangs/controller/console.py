"""Terminal of the controller, for ranks: their debuggers, and copies of their output.

One rank at a time may stop in its debugger, over all gangs; others continue without.
"""

from __future__ import annotations

import os
import signal
import termios
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from pytest_megatron.gangs.ipc.messages import (
    DebuggerAnswer,
    DebuggerLeft,
    DebuggerWanted,
    Message,
)
from pytest_megatron.gangs.lifecycle import GangState
from pytest_megatron.gangs.rank.logs import Tail
from pytest_megatron.gangs.supervisor.supervisor import Gang
from pytest_megatron.process.guard import send_signal
from pytest_megatron.session.options import Options

_COPY_EVERY_S = 0.05
_TWICE_S = 1.0


@dataclass(frozen=True, slots=True)
class _DebuggerRequest:
    """A rank that requests the debugger, or is in it."""

    gang: Gang
    rank: int
    reason: str
    pid: int

    @property
    def is_gone(self) -> bool:
        """True if the rank that asks can no longer be debugged."""
        state = self.gang.lifecycle.state
        is_over = state not in (GangState.RUNNING, GangState.CLOSING)
        return is_over or self.gang.lifecycle.has_ended(self.rank)

    def answer(self, *terminal: int) -> None:
        """Let the rank stop, at a terminal, or go on without one."""
        message = DebuggerAnswer(may_enter=bool(terminal))
        self.gang.peer(self.rank).send(message, terminal)


@dataclass(slots=True)
class Console:
    """Lends debuggers of ranks of this node the terminal.

    Attributes:
        config: Configuration of the controller.
        pdb_rank: The only rank that may stop; None allows the first that fails, and rank 0 at
            breakpoints.
        is_refusing: Whether no rank may stop: there is no terminal, or the session ends.
    """

    config: pytest.Config
    pdb_rank: int | None
    is_refusing: bool = False
    _active: _DebuggerRequest | None = None
    _last_failure: tuple[int, int] | None = None  # execution, rank
    _take_back: Callable[[], None] = lambda: None  # restores the terminal
    _interrupted_at: float = -_TWICE_S

    def handle(self, gang: Gang, rank: int, message: Message) -> None:
        """Handle a message of a rank's debugger."""
        self.settle()
        active = self._active
        match message:
            case DebuggerWanted(reason=reason, pid=pid):
                request = _DebuggerRequest(gang, rank, reason, pid)
                is_main = threading.current_thread() is threading.main_thread()  # has the signals
                if active is None and is_main and self._may_stop(request):
                    self._enter(request)
                else:
                    request.answer()
            case DebuggerLeft() if active and (active.gang, active.rank) == (gang, rank):
                self._leave()
            case _:
                pass

    def settle(self) -> None:
        """Release the terminal of a rank that is gone."""
        if self._active is not None and self._active.is_gone:
            self._leave()

    def _may_stop(self, request: _DebuggerRequest) -> bool:
        """Return whether a rank may stop in the debugger."""
        is_here = request.gang.configs[request.rank].node_rank == 0
        if self.is_refusing or request.is_gone or not is_here:
            return False
        if self.pdb_rank is not None:
            return request.rank == self.pdb_rank
        if request.reason != "exception":
            return request.rank == 0
        run = request.gang.lifecycle.queue.number
        if self._last_failure is None or self._last_failure[0] != run:
            self._last_failure = (run, request.rank)
        return self._last_failure == (run, request.rank)

    def _enter(self, request: _DebuggerRequest) -> None:
        """Give a rank's debugger the terminal."""
        capture = self.config.pluginmanager.get_plugin("capturemanager")
        if capture is not None:
            capture.suspend_global_capture(in_=True)
        self._active = request
        writer = self.config.get_terminal_writer()
        if writer.width_of_current_line:
            writer.line()
        writer.sep(">", f"rank {request.rank} of {request.gang.spec.world_size}")
        writer.flush()
        modes = termios.tcgetattr(0) if os.isatty(0) else None
        handler = signal.signal(signal.SIGINT, lambda *_: self._interrupt(request))

        def take_back() -> None:
            signal.signal(signal.SIGINT, handler)
            if modes is not None:  # the rank may have died with others
                termios.tcsetattr(0, termios.TCSADRAIN, modes)

        self._take_back = take_back
        request.answer(0, 1)

    def _interrupt(self, request: _DebuggerRequest) -> None:
        """Pass Ctrl-C on to a rank, which is in no job of the terminal.

        Twice within a second it interrupts the session: the rank may be stuck in C code.
        """
        before, self._interrupted_at = self._interrupted_at, time.monotonic()
        if self._interrupted_at - before < _TWICE_S:
            raise KeyboardInterrupt
        send_signal([request.pid], signal.SIGINT)

    def _leave(self) -> None:
        """Take the terminal back from a rank's debugger."""
        self._active = None
        self._take_back()
        capture = self.config.pluginmanager.get_plugin("capturemanager")
        if capture is not None:  # between tests it captures stdin, not stdout
            capture.resume_global_capture()
            capture.suspend_global_capture()


class Tee:
    """Follows the logs of chosen ranks of every gang on this node.

    Attributes:
        is_on: Whether output is copied: with `-s`, or with `--tee-ranks`.
    """

    def __init__(self, config: pytest.Config, options: Options, *, is_worker: bool) -> None:
        self._config = config
        self._options = options
        is_wanted = config.getoption("capture", "no") == "no" or "tee-ranks" in options.typed
        has_terminal = config.pluginmanager.has_plugin("terminalreporter")
        self.is_on = is_wanted and options.tee_ranks != () and not is_worker and has_terminal
        self._tails: dict[int, list[Tail]] = {}
        self._next_at = 0.0

    def wait_s(self, most_s: float) -> float:
        """Return the time that the controller may sleep."""
        return min(most_s, _COPY_EVERY_S) if self.is_on else most_s

    def follow(self, gang: Gang) -> None:
        """Copy the logs of a new gang, too."""
        chosen = self._options.tee_ranks
        if self.is_on:
            self._tails[gang.number] = [
                Tail(Path(rank_config.log_dir), rank_config.rank)
                for rank_config in gang.configs
                if rank_config.node_rank == self._options.node_rank
                and (chosen is None or rank_config.rank in chosen)
            ]

    def poll(self) -> None:
        """Copy new output of ranks, if it is time to."""
        if self._tails and time.monotonic() >= self._next_at:
            for tails in self._tails.values():
                self._copy(tails, is_ended=False)
            self._next_at = time.monotonic() + _COPY_EVERY_S

    def catch_up(self, gang: Gang) -> None:
        """Copy all output of a gang, before the result of its test."""
        self._copy(self._tails.get(gang.number, []), is_ended=True)

    def forget(self, gang: Gang) -> None:
        """Copy the rest of the output of a gang that is gone."""
        self.catch_up(gang)
        self._tails.pop(gang.number, None)

    def _copy(self, tails: list[Tail], *, is_ended: bool) -> None:
        """Write new lines of logs to the terminal."""
        if not tails:
            return
        writer = self._config.get_terminal_writer()
        for tail in tails:
            for line in tail.new_lines(is_ended=is_ended):
                if writer.width_of_current_line:
                    writer.line()
                writer.line(line, flush=True)

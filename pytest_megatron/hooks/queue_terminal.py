"""What is printed while workloads wait in a queue: on a terminal one line that stays at the bottom.

Elsewhere a line is printed where the counts changed, at most every ten seconds; where a reason or
the progress changed, at most once a minute; and every five minutes in any case.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

import pytest

from pytest_megatron.hooks.terminal import progress_text
from pytest_megatron.launch.follow import Progress, parse_progress
from pytest_megatron.report.queue import is_due, queue_text
from pytest_megatron.verdict.campaign import QueueProgress

_ERASE_BELOW = "\r\x1b[2K\x1b[1A"  # the line that we are in, and up to the one above


class QueueTerminal:
    """Shows the state of the queue below what pytest prints."""

    def __init__(self, config: pytest.Config, engine: str) -> None:
        """Begin to count the time that is left from now on."""
        self._config = config
        self._engine = engine
        self._started = time.monotonic()
        self._is_shown = False
        self._text = ""
        self._counts: tuple[int, ...] = ()
        self._detail = ""
        self._printed_at = float("-inf")
        self._progress: tuple[str, str] = ("", "")

    @property
    def _reporter(self) -> pytest.TerminalReporter | None:
        reporter: pytest.TerminalReporter | None = self._config.pluginmanager.get_plugin(
            "terminalreporter"
        )
        return reporter

    def listener(self, name: str) -> QueueListener:
        """Return what prints the lines of one workload under its name."""
        return QueueListener(self, name, has_iterations=self._config.get_verbosity() > 0)

    def show(self, standing: QueueProgress) -> None:
        """Show the state of the queue, if it is new."""
        reporter = self._reporter
        if reporter is None:
            return
        now = time.monotonic()
        text = queue_text(self._engine, standing, now - self._started, self._progress[1])
        if reporter.isatty:
            if not (self._is_shown and text == self._text):
                self.close()
                self._show_below(reporter, text)
            return
        counts = (standing.num_ended, standing.num_running, standing.num_waiting)
        detail = f"{standing.detail}; {self._progress[1]}"
        if is_due(
            now - self._printed_at,
            has_new_counts=counts != self._counts,
            has_new_detail=detail != self._detail,
        ):
            self._counts, self._detail, self._printed_at = counts, detail, now
            self.write([text])

    def note_progress(self, name: str, phase: int, progress: Progress) -> None:
        """Have the line say how far a workload is, until another one comes further."""
        self._progress = (name, progress_text(name, phase, progress))

    def note_end(self, name: str) -> None:
        """Have the line say no more how far a workload is."""
        if self._progress[0] == name:
            self._progress = ("", "")

    def write(self, lines: Sequence[str]) -> None:
        """Print whole lines."""
        reporter = self._reporter
        if reporter is None:
            return
        self.close()
        writer = reporter._tw  # noqa: SLF001 - pytest's own plugins reach it this way
        with self._uncaptured():
            reporter.ensure_newline()
            if writer.width_of_current_line:
                writer.line()
            for line in lines:
                writer.line(line)

    def close(self) -> None:
        """Take the line away; what pytest prints next goes on where it was."""
        reporter = self._reporter
        if not self._is_shown or reporter is None:
            return
        self._is_shown = False
        column = reporter._tw.width_of_current_line  # noqa: SLF001 - see above
        self._print(reporter, _ERASE_BELOW + (f"\x1b[{column}C" if column else ""))

    def _show_below(self, reporter: pytest.TerminalReporter, text: str) -> None:
        shown = text[: reporter._tw.fullwidth - 1]  # noqa: SLF001 - a wrapped line stays behind
        self._print(reporter, f"\n{shown}")
        self._is_shown, self._text = True, text

    def _print(self, reporter: pytest.TerminalReporter, text: str) -> None:
        """Print past pytest's writer, which counts the columns of its own line."""
        with self._uncaptured():
            file = reporter._tw._file  # noqa: SLF001 - see above
            file.write(text)
            file.flush()

    def _uncaptured(self) -> contextlib.AbstractContextManager[None]:
        capture = self._config.pluginmanager.get_plugin("capturemanager")
        if capture is None:
            return contextlib.nullcontext()
        found: contextlib.AbstractContextManager[None] = capture.global_and_fixture_disabled()
        return found


class QueueListener:
    """Prints what is said of one workload under its name, and has the line say how far it is.

    The iteration lines of a training become part of that line; `-v` copies them as well.
    """

    def __init__(self, terminal: QueueTerminal, name: str, *, has_iterations: bool) -> None:
        self._terminal = terminal
        self._name = name
        self._has_iterations = has_iterations

    def on_lines(self, lines: list[str]) -> None:
        """Print lines."""
        shown = [x for x in lines if self._has_iterations or parse_progress(x) is None]
        if shown:
            self._terminal.write([f"{self._name}: {line}" for line in shown])

    def on_progress(self, phase: int, progress: Progress) -> None:
        """Show it with the state of the queue."""
        self._terminal.note_progress(self._name, phase, progress)

"""Progress of workloads while they run: on a terminal, in a log, from workers of pytest-xdist."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from pytest_megatron.base.files import write_text_atomically
from pytest_megatron.base.text import rough_time
from pytest_megatron.hooks.ci_log import ci_log_of
from pytest_megatron.hooks.session import NOTE_PREFIX
from pytest_megatron.verdict.scheduler import QueueProgress
from pytest_megatron.workload.run.runner import Progress, parse_progress

_LEAST_SHARE = 0.05  # below it, what is left is a guess
_EVERY_S, _DETAIL_EVERY_S, _HEARTBEAT_S = 10.0, 60.0, 300.0
_LINE_EVERY_S = 10.0  # where the terminal cannot rewrite a line
_NOTE_EVERY_S = 2.0  # a note is on the disk before a reader sees it
_SECOND_MS = 1000


def uncaptured(config: pytest.Config) -> contextlib.AbstractContextManager[None]:
    """Return a context in which pytest captures no output."""
    capture = config.pluginmanager.get_plugin("capturemanager")
    if capture is None:
        return contextlib.nullcontext()
    found: contextlib.AbstractContextManager[None] = capture.global_and_fixture_disabled()
    return found


def can_rewrite(reporter: pytest.TerminalReporter) -> bool:
    """Return true on a terminal that can replace a line: none of an editor, nor a log of CI."""
    is_log = os.environ.get("TERM") == "dumb" or bool(os.environ.get("CI"))
    return bool(reporter.isatty) and not is_log


class LiveTerminal:
    """Copies the lines of tee'd ranks to the terminal and shows how far the training is.

    The iteration lines of the training become the progress line; `-v` copies them as well.
    """

    def __init__(self, config: pytest.Config, node_id: str, *, note: Path | None) -> None:
        """Begin to show.

        Args:
            config: Of this process.
            node_id: Of the workload.
            note: Where a process without a terminal, a worker of pytest-xdist, notes the progress
                for the one that has it; None shows it here.
        """
        reporter = config.pluginmanager.get_plugin("terminalreporter") if note is None else None
        self._config = config
        self._writer = None if reporter is None else reporter._tw  # pytest's plugins do this, too
        self._is_tty = reporter is not None and can_rewrite(reporter)
        self._ci_log = ci_log_of(config)
        self._copies_iterations = config.get_verbosity() > 0
        self._name = node_id.rpartition("::")[2]
        self._width = 0
        self._has_line = False
        self._next_line_at = time.monotonic() + (_LINE_EVERY_S if note is None else 0)
        self._note = note
        self._clock = StepClock()
        if self._is_tty:
            self._write([], f"{self._name}: starting")

    def close(self) -> None:
        """Take the progress line away."""
        self._write([], "")
        self._unfold()
        if self._note is not None:
            self._note.unlink(missing_ok=True)

    def on_lines(self, lines: list[str]) -> None:
        """Copy lines, without those that the progress line stands for."""
        shown = [x for x in lines if self._copies_iterations or parse_progress(x) is None]
        if shown and self._ci_log is not None and self._writer is not None:
            with uncaptured(self._config):
                self._ci_log.fold(f"{self._name}: output of ranks")
            self._has_line = True
        if shown:
            self._write(shown, None)

    def on_progress(self, phase: int, progress: Progress) -> None:
        """Show the progress, on a terminal always, elsewhere now and then."""
        text = progress_text(self._name, phase, self._clock.timed(phase, progress))
        if self._is_tty:
            self._write([], text)
        elif time.monotonic() < self._next_line_at:
            return
        elif self._note is not None:
            self._next_line_at = time.monotonic() + _NOTE_EVERY_S
            with contextlib.suppress(OSError):  # a full disk ends a run elsewhere
                write_text_atomically(self._note, text)
        else:
            self._next_line_at = time.monotonic() + _LINE_EVERY_S
            self._unfold()
            self._write([text], None)

    def _unfold(self) -> None:
        """End the folded section of a log of CI."""
        if self._ci_log is not None:
            with uncaptured(self._config):
                self._ci_log.unfold()

    def _write(self, lines: Sequence[str], status: str | None) -> None:
        """Write whole lines, and on a terminal a line that the next write replaces."""
        if self._writer is None or (not lines and not self._is_tty):
            return
        with uncaptured(self._config):
            if self._width:
                self._writer.write("\r" + " " * self._width + "\r")
            elif not self._has_line and (lines or status):
                self._writer.line()
                self._has_line = True
            for line in lines:
                self._writer.line(line)
            status = (status or "")[: self._writer.fullwidth - 1]  # a wrapped line cannot be undone
            self._width = len(status)
            self._writer.write(status, flush=True)


@dataclass(slots=True)
class StepClock:
    """Measures the time of an iteration, for trainings that print none."""

    _phase: int = 0
    _first: int = 0
    _at: float = 0.0

    def timed(self, phase: int, progress: Progress) -> Progress:
        """Return the progress with a time of its iterations, once there are two of them."""
        if progress.iteration_ms is not None:
            return progress
        now = time.monotonic()
        if phase != self._phase or progress.iteration < self._first:
            self._phase, self._first, self._at = phase, progress.iteration, now
        steps = progress.iteration - self._first
        return (
            replace(progress, iteration_ms=(now - self._at) / steps * 1000) if steps else progress
        )


class WorkersProgress:
    """Prints how far the trainings of pytest-xdist's workers are. Lives in their controller."""

    def __init__(
        self, config: pytest.Config, run_dir: Path, every_s: float = _LINE_EVERY_S
    ) -> None:
        self._config = config
        self._run_dir = run_dir
        self._every_s = every_s
        self._is_over = threading.Event()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtestloop(self) -> Generator[None, object, object]:
        """Print beside the loop, which waits for the workers."""
        thread = threading.Thread(target=self._print, daemon=True)
        thread.start()
        try:
            return (yield)
        finally:
            self._is_over.set()
            thread.join()
            for note in self._notes():
                note.unlink(missing_ok=True)

    def _notes(self) -> list[Path]:
        return sorted(self._run_dir.glob(f"{NOTE_PREFIX}*"))

    def _print(self) -> None:
        """Print a line for each training that came further since the last time."""
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        seen: set[str] = set()
        while not self._is_over.wait(self._every_s) and reporter is not None:
            texts = [_text_of(note) for note in self._notes()]
            new = [text for text in texts if text and text not in seen]
            seen = set(texts)
            if new:
                before = [""] if reporter._tw.width_of_current_line else []
                reporter._tw.write("\n".join([*before, *new, ""]), flush=True)


def _text_of(note: Path) -> str:
    try:
        return note.read_text(encoding="utf-8")
    except OSError:  # the training has ended
        return ""


def is_due(since_s: float, *, has_new_counts: bool, has_new_detail: bool) -> bool:
    """Return whether a line is worth printing where none can be replaced: in the log of CI.

    CI systems end what is silent for 10 minutes; a reason for waiting may change all the time.

    Args:
        since_s: Since the last line.
        has_new_counts: Whether more or fewer have ended, run or wait than it shows.
        has_new_detail: Whether the engine's detail or a training's progress is new.
    """
    limit_s = _EVERY_S if has_new_counts else _DETAIL_EVERY_S if has_new_detail else _HEARTBEAT_S
    return since_s >= limit_s


def queue_text(engine: str, standing: QueueProgress, elapsed_s: float) -> str:
    """Return the line.

    Args:
        engine: Name of the engine.
        standing: How far it is.
        elapsed_s: Since the workloads were submitted.
    """
    counts = [
        f"{standing.num_ended} of {standing.num_works} ended",
        f"{standing.num_running} running",
        f"{standing.num_waiting} waiting",
    ]
    if standing.num_held:
        counts.append(f"{standing.num_held} to be submitted")
    parts = [", ".join(counts)]
    if standing.detail:
        parts.append(standing.detail)
    share = standing.share_done
    if share is not None and _LEAST_SHARE <= share < 1:
        parts.append(f"about {rough_time(elapsed_s * (1 - share) / share)} left")
    return f"{engine}: {'; '.join(parts)}"


def progress_text(name: str, phase: int, progress: Progress) -> str:
    """Return how far a training is, in words; short, as 80 columns have to do."""
    of_phase = f", phase {phase}" if phase > 1 else ""
    parts = [f"{name}{of_phase}: iteration {progress.iteration}/{progress.last}"]
    if progress.loss is not None:
        parts.append(f"lm loss {_rounded(progress.loss)}")
    if progress.iteration_ms is not None:
        ms = progress.iteration_ms
        parts.append(f"{ms:.0f} ms a step" if ms < _SECOND_MS else f"{ms / 1000:.1f} s a step")
    left = progress.time_left_s
    if left is not None:
        parts.append(f"{rough_time(left)} left")
    return ", ".join(parts)


def _rounded(loss: str) -> str:
    try:
        return f"{float(loss):.4g}"
    except ValueError:
        return loss

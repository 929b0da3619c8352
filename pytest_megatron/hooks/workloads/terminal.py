"""Terminal output of workloads, while they run and at the end."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from pytest_megatron.hooks.ci_log import ci_log_of
from pytest_megatron.runs.record import RecordedWorkload
from pytest_megatron.verdict.job import WorkloadJob
from pytest_megatron.verdict.text import plan_text
from pytest_megatron.workload.plan.plan import AttemptPlan
from pytest_megatron.workload.run.runner import Progress, parse_progress

_LINE_EVERY_S = 10.0  # where the terminal cannot rewrite a line


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

    def __init__(self, config: pytest.Config, node_id: str, *, has_terminal: bool) -> None:
        """Begin to show; nothing without a terminal, as in workers of pytest-xdist."""
        reporter = config.pluginmanager.get_plugin("terminalreporter") if has_terminal else None
        self._config = config
        self._writer = None if reporter is None else reporter._tw  # pytest's plugins do this, too
        self._is_tty = reporter is not None and can_rewrite(reporter)
        self._ci_log = ci_log_of(config)
        self._copies_iterations = config.get_verbosity() > 0
        self._name = node_id.rpartition("::")[2]
        self._width = 0
        self._has_line = False
        self._next_line_at = time.monotonic() + _LINE_EVERY_S
        if self._is_tty:
            self._write([], f"{self._name}: starting")

    def close(self) -> None:
        """Take the progress line away."""
        self._write([], "")
        if self._ci_log is not None:
            self._ci_log.unfold()

    def on_lines(self, lines: list[str]) -> None:
        """Copy lines, without those that the progress line stands for."""
        shown = [x for x in lines if self._copies_iterations or parse_progress(x) is None]
        if shown and self._ci_log is not None and self._writer is not None:
            self._ci_log.fold(f"{self._name}: output of ranks")
        if shown:
            self._write(shown, None)

    def on_progress(self, phase: int, progress: Progress) -> None:
        """Show the progress, on a terminal always, elsewhere now and then."""
        text = progress_text(self._name, phase, progress)
        if self._is_tty:
            self._write([], text)
        elif time.monotonic() >= self._next_line_at:
            self._next_line_at = time.monotonic() + _LINE_EVERY_S
            if self._ci_log is not None:
                self._ci_log.unfold()
            self._write([text], None)

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


def print_plan(
    config: pytest.Config,
    job: WorkloadJob,
    plan: AttemptPlan,
    golden: Path | None,
    found: Sequence[str],
) -> None:
    """Print the plan of a workload, and the findings of the checks about it."""
    writer = config.get_terminal_writer()
    writer.line(plan_text(job, plan, golden))
    for line in found:
        writer.line(f"  {line}")
    writer.line()


def print_summary(
    reporter: pytest.TerminalReporter,
    records: Mapping[str, RecordedWorkload],
    goldens: Sequence[str],
    shorten: Callable[[str], str],
) -> None:
    """Print a line for each workload that ran, then the lines about goldens."""
    if records:
        reporter.section("workloads", sep="-")
    for node_id, record in records.items():
        other = "yellow" if record.is_held else "red"
        colour = {"passed": "green", "flaky": "yellow"}.get(record.verdict, other)
        reporter.write(f"{record.verdict:<7}", **{colour: True})
        reporter.write(shorten(f" {node_id}  {record.summary}\n"))
    for line in goldens:
        reporter.write_line(shorten(line))


def progress_text(name: str, phase: int, progress: Progress) -> str:
    """Return how far a training is, in words."""
    parts = [f"{name}: iteration {progress.iteration}/{progress.last}"]
    if phase > 1:
        parts[0] = f"{name}, phase {phase}: iteration {progress.iteration}/{progress.last}"
    if progress.loss is not None:
        parts.append(f"lm loss {progress.loss}")
    left = progress.time_left_s
    if left is not None:
        parts.append(f"about {left:.0f} s left")
    return ", ".join(parts)

"""The line at the bottom of a terminal, and what pytest prints above it."""

from __future__ import annotations

from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import cast

import pytest
from _pytest._io import TerminalWriter
from tiny_project import wait_until

from pytest_megatron.session.state import NOTE_PREFIX
from pytest_megatron.workloads.items.queue import QueueTerminal
from pytest_megatron.workloads.items.report import LiveTerminal, WorkersProgress
from pytest_megatron.workloads.training.run.runner import Progress, parse_progress
from pytest_megatron.workloads.verdict.scheduler import QueueProgress

STANDING = QueueProgress(
    num_works=3,
    num_ended=0,
    num_running=1,
    num_waiting=2,
    num_held=4,
    detail="job 41 waits: Resources",
)
LINE = "pool: 0 of 3 ended, 1 running, 2 waiting, 4 to be submitted; job 41 waits: Resources"


class FakeReporter:
    """As much of pytest's reporter as is asked for."""

    def __init__(self) -> None:
        self.file = StringIO()
        self._tw = TerminalWriter(self.file)
        self._tw.fullwidth = 60

    def ensure_newline(self) -> None: ...

    def letters(self, text: str) -> None:
        self._tw.write(text)


@dataclass
class FakeConfig:
    """Has one plugin, and is its own plugin manager."""

    reporter: FakeReporter
    pluginmanager: FakeConfig = field(init=False)

    def __post_init__(self) -> None:
        self.pluginmanager = self

    def getoption(self, name: str) -> int:
        assert name == "verbose"
        return 0

    def get_plugin(self, name: str) -> FakeReporter | None:
        return self.reporter if name == "terminalreporter" else None


def terminal_of(reporter: FakeReporter) -> QueueTerminal:
    return QueueTerminal(cast("pytest.Config", FakeConfig(reporter)), "pool")


def test_a_line_is_printed_where_counts_changed() -> None:
    reporter = FakeReporter()
    terminal = terminal_of(reporter)
    reporter.letters(".")
    for _ in range(3):
        terminal.show(STANDING)
    assert reporter.file.getvalue() == f".\n{LINE}\n"


def note(terminal: QueueTerminal, name: str, iteration: int, ms: float | None = None) -> None:
    listener = terminal.listener(name)
    printed = f" iteration {iteration:8}/      50 | lm loss: 2.500000E+00 |"
    if ms is not None:
        printed += f" elapsed time per iteration (ms): {ms} |"
    progress = parse_progress(printed)
    assert progress is not None
    listener.on_lines([printed])
    listener.on_progress("phase 1", progress)


def test_each_training_that_runs_has_a_line() -> None:
    reporter = FakeReporter()
    terminal = terminal_of(reporter)
    for number in range(10):
        note(terminal, f"row{number}", 5, 100.0)
    terminal.show(STANDING)
    lines = reporter.file.getvalue().splitlines()
    assert lines[:2] == [LINE, "  row0: iteration 5/50, lm loss 2.5, 100 ms a step, 4 s left"]
    assert lines[-1] == "  and 2 more"
    assert len(lines) == 10


def test_a_training_that_ended_has_no_line() -> None:
    reporter = FakeReporter()
    terminal = terminal_of(reporter)
    note(terminal, "tp2_pp2[dev-dgx_h100]", 5, 1500.0)
    note(terminal, "tp1[dev-cpu]", 10, 120.0)
    terminal.note_end("tp2_pp2[dev-dgx_h100]")
    terminal.show(STANDING)
    second = "  tp1[dev-cpu]: iteration 10/50, lm loss 2.5, 120 ms a step, 5 s left"
    assert reporter.file.getvalue() == f"{LINE}\n{second}\n"


def test_trainings_of_workers_are_shown_by_their_controller(tmp_path: Path) -> None:
    reporter = FakeReporter()
    config = cast("pytest.Config", FakeConfig(reporter))
    lives = [
        LiveTerminal(config, f"r.yaml::row{i}", note=tmp_path / f"{NOTE_PREFIX}gw{i}")
        for i in range(2)
    ]
    for number, live in enumerate(lives):
        live.on_progress(
            "phase 1", Progress(iteration=5, last=50, iteration_ms=100.0 * (number + 1))
        )
    reporter.letters(".")
    loop = WorkersProgress(config, tmp_path, every_s=0.01).pytest_runtestloop()
    next(loop)
    wait_until(lambda: "row1" in reporter.file.getvalue(), "both rows are printed")
    lives[0].close()
    with pytest.raises(StopIteration):
        loop.send(None)
    assert reporter.file.getvalue() == (
        ".\nrow0: iteration 5/50, 100 ms a step, 4 s left"
        "\nrow1: iteration 5/50, 200 ms a step, 9 s left\n"
    )
    assert list(tmp_path.iterdir()) == []

"""The line at the bottom of a terminal, and what pytest prints above it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from io import StringIO
from typing import cast

import pytest
from _pytest._io import TerminalWriter

from pytest_megatron.hooks.workloads.queue import QueueTerminal
from pytest_megatron.verdict.scheduler import QueueProgress
from pytest_megatron.workload.run.runner import parse_progress

STANDING = QueueProgress(
    num_works=3,
    num_ended=0,
    num_running=1,
    num_waiting=2,
    num_held=0,
    detail="",
    share_done=None,
)
LINE = "pool: 0 of 3 ended, 1 running, 2 waiting"
_MOVE = re.compile(r"\x1b\[(\d*)([AC])|\x1b\[2(K)|(\r)|(\n)|(.)")


class FakeReporter:
    """As much of pytest's reporter as is asked for."""

    def __init__(self, *, isatty: bool) -> None:
        self.isatty = isatty
        self.file = StringIO()
        self._tw = TerminalWriter(self.file)
        self._tw.fullwidth = 60

    def ensure_newline(self) -> None: ...

    def letters(self, text: str) -> None:
        self._tw.write(text)

    def screen(self) -> list[str]:
        """What a terminal shows after all of it."""
        rows, row, column = [""], 0, 0
        for number, move, erase, home, feed, letter in _MOVE.findall(self.file.getvalue()):
            if move == "A":
                row -= int(number)
            elif move == "C":
                column += int(number)
            elif erase:
                rows[row] = ""
            elif home:
                column = 0
            elif feed:
                row, column = row + 1, 0
                rows += [""] * (row == len(rows))
            else:
                rows[row] = rows[row].ljust(column)[:column] + letter + rows[row][column + 1 :]
                column += 1
        return rows


@dataclass
class FakeConfig:
    """Has one plugin, and is its own plugin manager."""

    reporter: FakeReporter
    pluginmanager: FakeConfig = field(init=False)

    def __post_init__(self) -> None:
        self.pluginmanager = self

    def get_verbosity(self) -> int:
        return 0

    def get_plugin(self, name: str) -> FakeReporter | None:
        return self.reporter if name == "terminalreporter" else None


def terminal_of(reporter: FakeReporter) -> QueueTerminal:
    return QueueTerminal(cast("pytest.Config", FakeConfig(reporter)), "pool")


def test_letters_go_on_in_their_line_and_the_queue_stays_below() -> None:
    reporter = FakeReporter(isatty=True)
    terminal = terminal_of(reporter)
    reporter.letters("..")
    terminal.show(STANDING)
    assert reporter.screen() == ["..", LINE]
    terminal.close()
    reporter.letters("F")
    terminal.show(replace(STANDING, num_ended=1))
    assert reporter.screen() == ["..F", LINE.replace("0 of", "1 of")]


def test_lines_of_a_workload_are_kept_above_the_queue() -> None:
    reporter = FakeReporter(isatty=True)
    terminal = terminal_of(reporter)
    reporter.letters(".")
    terminal.show(STANDING)
    terminal.listener("gpt").on_lines(["attempt 1: no luck"])
    terminal.show(STANDING)
    assert reporter.screen() == [".", "gpt: attempt 1: no luck", "", LINE]


def test_without_a_terminal_a_line_is_printed_where_counts_changed() -> None:
    reporter = FakeReporter(isatty=False)
    terminal = terminal_of(reporter)
    reporter.letters(".")
    for _ in range(3):
        terminal.show(STANDING)
    assert reporter.file.getvalue() == f".\n{LINE}\n"


def test_the_line_says_how_far_the_training_is_that_came_further_last() -> None:
    reporter = FakeReporter(isatty=True)
    terminal = terminal_of(reporter)
    reporter._tw.fullwidth = 120
    listener = terminal.listener("gpt")
    printed = " iteration        5/      10 | lm loss: 2.500000E+00 |"
    progress = parse_progress(printed)
    assert progress is not None
    listener.on_lines([printed])
    listener.on_progress(1, progress)
    terminal.show(STANDING)
    assert reporter.screen() == ["", f"{LINE}; gpt: iteration 5/10, lm loss 2.500000E+00"]
    terminal.note_end("gpt")
    terminal.show(STANDING)
    assert reporter.screen() == ["", LINE]

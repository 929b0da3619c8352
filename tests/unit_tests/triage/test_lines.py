"""What stands around the words of a line, and which tracebacks ended a rank."""

from __future__ import annotations

import pytest
from launches import traceback

from pytest_megatron.triage.logs.exits import ProcessExit, read_exits
from pytest_megatron.triage.logs.lines import Line, parse_iteration, parse_line
from pytest_megatron.triage.logs.traceback import HEADER, is_at_end, read_chain


@pytest.mark.parametrize(
    ("raw", "text", "rank"),
    [
        ("plain", "plain", None),
        ("[rank3]: text", "text", 3),
        ("[default3]:text", "text", 3),
        ("[default1]:[rank9]: text", "text", 9),
        ("\x1b[31mred\x1b[0m", "red", None),
        ("[rank1]:[E1121 09:00:00.1 X.cpp:1] x", "[E1121 09:00:00.1 X.cpp:1] x", 1),
        (
            "[E1121 09:00:00.1 X.cpp:1] [PG ID 0 PG GUID 0(default_pg) Rank 7] x",
            "[E1121 09:00:00.1 X.cpp:1] [PG ID 0 PG GUID 0(default_pg) Rank 7] x",
            7,
        ),
        ("2026-11-21T09:00:00.1234567Z [rank2]: x", "x", 2),
    ],
)
def test_a_line_says_whose_it_is(raw: str, text: str, rank: int | None) -> None:
    line = parse_line(raw)
    assert (line.text, line.rank) == (text, rank)


@pytest.mark.parametrize(
    "raw",
    [
        "[2026-11-21 09:00:01] x",
        "2026-11-21T09:00:01 x",
        "E1121 09:00:01.000000 99 torch/x.py:1] x",
        "[rank0]:[W1121 09:00:01.000000000 X.cpp:1] x",
    ],
)
def test_a_line_says_when_it_was_written(raw: str) -> None:
    earlier = parse_line("2026-11-21 08:59:59 y").time_s
    found = parse_line(raw).time_s
    assert earlier is not None
    assert found is not None
    assert found - earlier == 2.0


@pytest.mark.parametrize("raw", ["2026-13-41 09:00:00 x", "E9999 99:99:99 x", "x", ""])
def test_a_line_without_a_time_has_none(raw: str) -> None:
    assert parse_line(raw).time_s is None


def test_an_iteration_is_read() -> None:
    assert parse_iteration(" iteration        7/      50 | lm loss: 1 |") == (7, 50)
    assert parse_iteration("number of nan iterations: 0") is None


def lines(text: str) -> list[Line]:
    return [parse_line(raw) for raw in text.split("\n")]


def test_a_traceback_is_read_with_its_own_frame() -> None:
    chain = read_chain(lines(traceback("ValueError: bad\n\tsecond line")), 0)
    assert chain is not None
    assert (chain.last.message, chain.last.own_frame) == (
        "ValueError: bad\n\tsecond line",
        "train.py:12 in step",
    )


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        ("", True),
        (
            "[rank0]:[W1121 09:00:00.1 X.cpp:1] Warning: destroy_process_group() was not called\n",
            True,
        ),
        ("wandb: Find logs at x\n" * 40, True),
        (" iteration        8/      50 | lm loss: 1 |\n", False),
        ("going on with the next batch\n" * 9, False),
    ],
)
def test_what_follows_a_traceback_tells_whether_it_ended_the_rank(
    after: str, *, expected: bool
) -> None:
    found = lines(traceback("ValueError: bad") + after)
    chain = read_chain(found, 0)
    assert chain is not None
    assert is_at_end(found, chain.last.said) is expected


def test_an_exception_that_was_ignored_ended_nothing() -> None:
    found = lines("Exception ignored in: <function x>\n" + traceback("OSError: y"))
    chain = read_chain(found, 1)
    assert chain is not None
    assert chain.is_ignored


def test_a_header_without_an_exception_is_no_traceback() -> None:
    assert read_chain(lines(f"{HEADER}:\n  File 'x'"), 0) is None


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "srun: error: n1: tasks 0-1,3: Exited with exit code 2",
            [(0, "exit code 2"), (1, "exit code 2"), (3, "exit code 2")],
        ),
        ("srun: error: n1: task 2: Killed", [(2, "SIGKILL")]),
        ("srun: error: n1: task 2: Segmentation fault (core dumped)", [(2, "SIGSEGV")]),
        (
            "mpirun noticed that process rank 1 with PID 0 on node x exited on signal 9 (Killed).",
            [(1, "SIGKILL")],
        ),
        (
            "E1121 09:00:00 x] failed (exitcode: -6) local_rank: 3 (pid: 7) of binary: p",
            [(3, "SIGABRT")],
        ),
        (
            "[rank: 1] Child process with PID 27721 terminated with code -9. Forcefully t",
            [(1, "SIGKILL")],
        ),
        ("srun: error: Unable to create step", []),
        ("srun: error: n1: task 2: Confused", []),
    ],
)
def test_launchers_tell_how_ranks_ended(line: str, expected: list[tuple[int, str]]) -> None:
    assert [(end.rank, end.how) for end in read_exits(line, line, 0)] == expected


def test_a_row_of_torchs_table_carries_what_the_rank_raised() -> None:
    around = (
        "[0]:\n  time      : 2026-11-21_09:00:00\n  host      : h\n"
        "  rank      : 5 (local_rank: 1)\n  exitcode  : 1 (pid: 9)\n  error_file: /x/error.json\n"
        "  traceback : Traceback (most recent call last):\n"
        "    File \"/job/train.py\", line 3, in main\n      x()\n    KeyError: 'y'\n    \n"
        "------------------------------------------------------------\n"
    )
    at = around.index("  rank ")
    (end,) = read_exits("  rank      : 5 (local_rank: 1)", around, at)
    assert isinstance(end, ProcessExit)
    assert (end.rank, end.how, end.message, end.shown) == (
        *(5, "exit code 1", "KeyError: 'y'"),
        "exitcode  : 1 (pid: 9)",
    )

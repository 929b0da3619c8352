from __future__ import annotations

from pathlib import Path

import pytest

from pytest_megatron.runs.layout import PhaseDirs
from pytest_megatron.workloads.training.run.runner import (
    FollowedFile,
    LogWatch,
    Progress,
    parse_progress,
)

LINE = (
    " [2026-01-31 12:00:00] iteration        {}/      50 | consumed samples:           96 | "
    "elapsed time per iteration (ms): 1500.0 | learning rate: 1.0E-04 | lm loss: {} | "
    "number of nan iterations:   0 |"
)


@pytest.fixture
def dirs(tmp_path: Path) -> PhaseDirs:
    dirs = PhaseDirs(root=tmp_path)
    dirs.logs.mkdir()
    return dirs


def write(dirs: PhaseDirs, rank: int, text: str, name: str = "stdout.log") -> None:
    path = dirs.logs / "none_x" / "attempt_0" / str(rank) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(text)


def test_megatrons_iteration_line_is_understood() -> None:
    progress = parse_progress(LINE.format(3, "1.084281E+01"))
    assert progress == Progress(iteration=3, last=50, loss="1.084281E+01", iteration_ms=1500.0)
    assert progress.time_left_s == 47 * 1.5


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        pytest.param(LINE.format(4, "nan").replace("lm loss", "x"), None, id="no loss"),
        pytest.param(LINE.format(4, "nan"), "nan", id="nan"),
    ],
)
def test_a_loss_is_kept_as_printed(line: str, expected: str | None) -> None:
    progress = parse_progress(line)
    assert progress is not None
    assert progress.loss == expected


@pytest.mark.parametrize("line", ["", "iteration 3", "saving at iteration 3/ to disk", "0.5/1.0 |"])
def test_other_lines_are_no_progress(line: str) -> None:
    assert parse_progress(line) is None


def test_a_line_counts_once_it_is_complete(tmp_path: Path) -> None:
    log = tmp_path / "log"
    followed = FollowedFile(log)
    assert list(followed.new_lines()) == []
    log.write_bytes(b"one\ntw")
    assert list(followed.new_lines()) == ["one"]
    with log.open("ab") as file:
        file.write(b"o\r\n\xff\n")
    assert list(followed.new_lines()) == ["two", "\N{REPLACEMENT CHARACTER}"]


def test_lines_of_teed_ranks_are_handed_on(dirs: PhaseDirs) -> None:
    dirs.launcher_log.write_text("agent\n[default1]:hello\n[default0]:[rank0]: Traceback\n")
    assert LogWatch(dirs).poll() == ["[rank1]: hello", "[rank0]: Traceback"]


def test_progress_comes_from_any_rank(dirs: PhaseDirs) -> None:
    watch = LogWatch(dirs)
    write(dirs, 3, LINE.format(7, "2.0") + "\n")
    watch.poll()
    assert watch.progress == Progress(iteration=7, last=50, loss="2.0", iteration_ms=1500.0)


def test_a_hung_collective_is_seen_on_a_rank_that_nobody_watches(dirs: PhaseDirs) -> None:
    watch = LogWatch(dirs)
    line = "[E1] [Rank 5] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)\n"
    write(dirs, 5, line, "stderr.log")
    watch.poll()
    assert watch.hung_rank == 5


TRACE = "Traceback (most recent call last):\nValueError: x\n"


@pytest.mark.parametrize(
    ("later", "is_outlived"),
    [
        ({1: LINE.format(4, "2.0") + "\n"}, True),
        ({1: "step: 4 loss 2.0\n" * 8}, True),
        ({1: "cleaning up\nsaved\n"}, False),
        ({0: LINE.format(4, "2.0") + "\n"}, False),  # of another rank, which waits for nobody
        ({}, False),
    ],
)
def test_a_rank_that_goes_on_outlives_its_traceback(
    dirs: PhaseDirs, later: dict[int, str], *, is_outlived: bool
) -> None:
    watch = LogWatch(dirs)
    write(dirs, 1, TRACE, "stderr.log")
    write(dirs, 1, LINE.format(3, "2.0") + "\n")  # before it or after it, nobody knows
    watch.poll()
    for rank, text in later.items():
        write(dirs, rank, text)
    watch.drain()
    assert watch.outlived == ("1/stderr.log",) * is_outlived
    write(dirs, 1, TRACE, "stderr.log")
    watch.drain()
    assert watch.outlived == ()


def test_only_what_is_new_ends_a_silence(dirs: PhaseDirs) -> None:
    write(dirs, 3, "started")
    watch = LogWatch(dirs)
    watch.poll()
    began = watch.changed_at
    watch.poll()
    assert watch.changed_at == began
    write(dirs, 3, ", and goes on")  # a line without its end, as a progress bar has none
    watch.poll()
    assert watch.changed_at > began


def test_progress_behind_megabytes_of_output_is_found(dirs: PhaseDirs) -> None:
    watch = LogWatch(dirs)
    write(dirs, 0, ("x" * 1023 + "\n") * 3072 + LINE.format(9, "2.0") + "\n")
    watch.drain()
    assert watch.progress is not None
    assert watch.progress.iteration == 9

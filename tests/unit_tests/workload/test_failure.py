from __future__ import annotations

import json
from pathlib import Path

import pytest

from pytest_megatron.runs.layout import PhaseDirs
from pytest_megatron.workload.run.rank_failures import (
    RankFailure,
    first_failure,
    read_failures,
    tail,
)

TRACE = """\
some line
[rank1]: Traceback (most recent call last):
[rank1]:   File "/home/me/train.py", line 12, in <module>
[rank1]:     main()
[rank1]:   File "/usr/lib/python3.11/json/__init__.py", line 3, in loads
[rank1]:     raise
[rank1]: ValueError: no
"""
TABLE = """\
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-01-31_12:00:00
  host      : h
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 11)
  error_file: <N/A>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-01-31_12:00:00
  host      : h
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 12)
  error_file: <N/A>
"""


def failure(
    rank: int, *, code: int | None = 1, message: str | None = None, when: int | None = None
) -> RankFailure:
    return RankFailure(
        rank=rank,
        exit_code=code,
        message=message,
        timestamp=when,
        frame=None,
        tail=(),
        log=Path(f"logs/{rank}/stderr.log"),
    )


@pytest.fixture
def dirs(tmp_path: Path) -> PhaseDirs:
    dirs = PhaseDirs(root=tmp_path)
    for rank in (0, 1):
        (dirs.logs / str(rank)).mkdir(parents=True)
        (dirs.logs / str(rank) / "stderr.log").touch()
    return dirs


@pytest.mark.parametrize(
    ("failures", "expected"),
    [
        pytest.param([], None, id="none"),
        pytest.param([failure(0, code=0), failure(1, code=None)], None, id="no trace"),
        pytest.param([failure(0, code=-15), failure(1, code=1)], 1, id="SIGTERM follows"),
        pytest.param([failure(0, code=1, message="E: x"), failure(1, code=-9)], 1, id="signal"),
        pytest.param(
            [failure(0, message="RuntimeError: Connection closed by peer", when=1), failure(1)],
            1,
            id="a lost connection follows",
        ),
        pytest.param(
            [failure(0, message="E: late", when=9), failure(1, message="E: early", when=5)],
            1,
            id="the earlier",
        ),
        pytest.param([failure(0, message="E: a"), failure(1, message="E: b")], 0, id="the lower"),
    ],
)
def test_the_rank_that_the_others_follow_from_is_found(
    failures: list[RankFailure], expected: int | None
) -> None:
    found = first_failure(failures)
    assert (None if found is None else found.rank) == expected


def test_exit_codes_come_from_the_agents_table(dirs: PhaseDirs) -> None:
    dirs.launcher_log.write_text(TABLE)
    assert [(f.rank, f.exit_code) for f in read_failures(dirs)] == [(0, -15), (1, -9)]


def test_a_traceback_gives_message_and_the_frame_outside_of_libraries(dirs: PhaseDirs) -> None:
    (dirs.logs / "1" / "stderr.log").write_text(TRACE)
    found = read_failures(dirs)[1]
    assert (found.message, found.frame) == ("ValueError: no", "train.py:12 in <module>")
    assert (found.tail[0], found.tail[-1]) == (
        "Traceback (most recent call last):",
        "ValueError: no",
    )


def test_torchs_error_file_gives_message_and_time(dirs: PhaseDirs) -> None:
    message = {"message": "ValueError: x", "extraInfo": {"timestamp": "1700000000"}}
    (dirs.logs / "0" / "error.json").write_text(json.dumps({"message": message}))
    found = read_failures(dirs)[0]
    assert (found.message, found.timestamp) == ("ValueError: x", 1700000000)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"message": {}}', '{"message": null}'])
def test_a_damaged_error_file_says_nothing(dirs: PhaseDirs, text: str) -> None:
    (dirs.logs / "0" / "error.json").write_text(text)
    assert read_failures(dirs)[0].message is None


def test_ranks_are_in_the_order_of_numbers(dirs: PhaseDirs) -> None:
    for rank in (10, 2):
        (dirs.logs / str(rank)).mkdir()
    assert [f.rank for f in read_failures(dirs)] == [0, 1, 2, 10]


def test_the_tail_of_a_log_without_a_traceback_is_its_last_lines(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("\n".join(f"line {n}" for n in range(100_000)) + "\n\n")
    assert tail(tmp_path / "log") == tuple(f"line {n}" for n in range(99_990, 100_000))
    assert tail(tmp_path / "none") == ()


def test_a_long_traceback_keeps_its_ends(tmp_path: Path) -> None:
    frames = "".join(f'  File "a.py", line {n}, in f\n' for n in range(100))
    (tmp_path / "log").write_text(f"Traceback (most recent call last):\n{frames}KeyError: 1\n")
    lines = tail(tmp_path / "log")
    assert len(lines) == 30
    assert (lines[2], lines[-1]) == ("  ...", "KeyError: 1")

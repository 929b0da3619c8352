from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from pytest_megatron.gangs.rank.logs import Tail, read_piece

# Redirects its streams as a rank does; what it could learn is in the exit code and in `seen`.
RANK = """
import os, sys
from pathlib import Path
from pytest_megatron.gangs.rank.logs import RankLogs
logs = RankLogs(Path(sys.argv[1]))
logs.redirect()
print("before")
assert logs.new_text() == [("stdout", "before\\n")]
print("from python")
os.write(1, b"from below\\n")
sys.stderr.write("an error without an end")
Path(sys.argv[1], "seen").write_text(repr(logs.new_text()))
assert logs.new_text() == []
assert sys.stdin.read() == ""
"""
FULL = """
import os, sys
from pathlib import Path
from pytest_megatron.gangs.rank.logs import RankLogs
logs = RankLogs(Path(sys.argv[1]))
logs.redirect()
full = os.open("/dev/full", os.O_WRONLY)
os.dup2(full, 1)
print("lost")
sys.stdout.flush()
assert logs.new_text() == []
os._exit(7)
"""


def start(program: str, directory: Path) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-c", program, str(directory)],
        input="typed",
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return done.returncode, done.stdout, done.stderr


def test_what_a_rank_prints_is_in_its_files_and_in_pieces_for_reports(tmp_path: Path) -> None:
    assert start(RANK, tmp_path) == (0, "", "")
    assert (tmp_path / "stdout.log").read_text() == "before\nfrom python\nfrom below\n"
    assert (tmp_path / "stderr.log").read_text() == "an error without an end"
    assert (tmp_path / "seen").read_text() == repr(
        [("stdout", "from python\nfrom below\n"), ("stderr", "an error without an end")]
    )


def test_a_full_disk_loses_text_and_no_test(tmp_path: Path) -> None:
    assert start(FULL, tmp_path) == (7, "", "")


def test_of_a_long_piece_the_end_is_shown_and_where_the_rest_is(tmp_path: Path) -> None:
    log = tmp_path / "stdout.log"
    log.write_bytes(b"a" * 1000 + b"b" * (1 << 18))
    assert read_piece(log, 0, log.stat().st_size) == (
        f"[1000 bytes more are in {log}]\n{'b' * (1 << 18)}"
    )
    assert read_piece(tmp_path / "no.log", 0, 10) == ""


def test_a_tail_yields_whole_lines_with_the_rank(tmp_path: Path) -> None:
    tail = Tail(tmp_path, 3)
    assert list(tail.new_lines()) == []
    log = tmp_path / "stdout.log"
    log.write_bytes(b"one\ntwo\nthr")
    assert list(tail.new_lines()) == ["[rank3]: one", "[rank3]: two"]
    with log.open("ab") as file:
        file.write(b"ee\nrest \xff")
    assert list(tail.new_lines()) == ["[rank3]: three"]
    assert list(tail.new_lines(is_ended=True)) == ["[rank3]: rest \N{REPLACEMENT CHARACTER}"]


def test_a_tail_takes_a_flood_in_pieces_until_the_end(tmp_path: Path) -> None:
    tail = Tail(tmp_path, 0)
    (tmp_path / "stdout.log").write_bytes(b"x\n" * 100_000 + b"y" * 100_000)
    num_first = len(list(tail.new_lines()))
    assert 0 < num_first < 100_000
    rest = list(tail.new_lines(is_ended=True))
    assert len([line for line in rest if line == "[rank0]: x"]) == 100_000 - num_first
    assert "".join(line.removeprefix("[rank0]: ") for line in rest if "y" in line) == "y" * 100_000
    assert list(tail.new_lines(is_ended=True)) == []

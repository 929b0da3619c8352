"""Finding texts in logs: at the borders of pieces, in floods, in long lines; in little memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_megatron.triage.logs.scan import Scanner, line_number, lines_at

PIECE = 4 << 20


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "x.log"


@pytest.mark.parametrize("at", [0, 1, PIECE - 9, PIECE - 4, PIECE - 1, PIECE, PIECE + 1])
def test_a_text_is_found_once_wherever_pieces_end(log: Path, at: int) -> None:
    log.write_bytes(b"." * at + b"needle" + b"." * 100)
    assert Scanner(["needle"]).find(log) == (at,)


def test_texts_at_the_end_of_a_file_without_a_newline(log: Path) -> None:
    log.write_bytes(b"first\nneedle")
    (line,) = lines_at(log, Scanner(["needle"]).find(log))
    assert (line.start, line.end, line.text) == (6, 12, "needle")


def test_more_texts_than_the_library_searches_at_once(log: Path) -> None:
    texts = [f"text-{n:03d}-" for n in range(200)]
    log.write_text("\n".join(texts))
    assert len(Scanner(texts).find(log)) == 200


def test_a_text_within_another_one_is_found_for_both(log: Path) -> None:
    log.write_text("a needlework\n")
    assert Scanner(["needle", "needlework"]).find(log) == (2,)


def test_of_a_flood_the_first_and_the_last_lines_are_kept(log: Path) -> None:
    log.write_text("".join(f"needle {n}\n" for n in range(50_000)))
    found = lines_at(log, Scanner(["needle"]).find(log))
    assert [found[0].text, found[-1].text] == ["needle 0", "needle 49999"]
    assert len(found) == 600


def test_a_line_of_megabytes_is_cut(log: Path) -> None:
    log.write_bytes(b"x" * (2 << 20) + b"needle" + b"y" * (2 << 20))
    (line,) = lines_at(log, Scanner(["needle"]).find(log))
    assert "needle" in line.text
    assert len(line.text) < 10_000


def test_of_a_progress_bar_the_part_with_the_text_is_the_line(log: Path) -> None:
    log.write_bytes(b" 1%\r 2%\rneedle here\r 3%\n")
    (line,) = lines_at(log, Scanner(["needle"]).find(log))
    assert line.text == "needle here"


def test_two_texts_in_one_line_are_one_line(log: Path) -> None:
    log.write_text("needle and thread\nthread\n")
    found = lines_at(log, Scanner(["needle", "thread"]).find(log))
    assert [line.text for line in found] == ["needle and thread", "thread"]


def test_lines_are_counted_from_one(log: Path) -> None:
    log.write_bytes(b"a\nb\nneedle\n")
    assert [line_number(log, offset) for offset in (0, 2, 4)] == [1, 2, 3]


def test_bytes_that_are_no_text_do_no_harm(log: Path) -> None:
    log.write_bytes(b"\xff\xfe needle \xc3\n")
    (line,) = lines_at(log, Scanner(["needle"]).find(log))
    assert "needle" in line.text


def test_an_empty_file(log: Path) -> None:
    log.write_bytes(b"")
    assert Scanner(["needle"]).find(log) == ()

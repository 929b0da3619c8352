from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from pytest_megatron.base.files import (
    JsonValue,
    append_lines,
    parse_json,
    read_bytes,
    read_json,
    write_json_atomically,
    write_text_atomically,
)


def test_a_write_replaces_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text("old and much longer than the new one")
    write_json_atomically(path, {"b": 1, "a": [None]})
    assert json.loads(path.read_text()) == {"b": 1, "a": [None]}
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        write_text_atomically(path, "\ud800")
    assert (path.read_text(), [p.name for p in tmp_path.iterdir()]) == ("old", ["run.json"])


def test_a_fifo_is_refused_instead_of_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "run.json")
    with pytest.raises(OSError, match="is a FIFO, expected a regular file"):
        read_json(tmp_path / "run.json")


def test_a_device_is_refused() -> None:
    with pytest.raises(OSError, match="is a device, expected a regular file"):
        read_bytes(Path("/dev/zero"))


def test_a_file_larger_than_the_limit_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "golden.json"
    with path.open("wb") as file:
        file.truncate(2 << 30)  # sparse
    with pytest.raises(OSError, match="is larger than 268435456 bytes"):
        read_bytes(path)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 100_000, "nested too deeply"),
        ("9" * 4_301, "more than 300 digits"),
        ("1" * 400, "more than 300 digits"),
        ("{", "Expecting property name"),
        (b"\xff\xff", "codec can't decode"),
    ],
)
def test_hostile_json_is_a_value_error(text: str | bytes, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_json(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r'{"\ud800": ["x\udfffy"]}', {"\ufffd": ["x\ufffdy"]}),
        (r'"\ud83d\ude00"', "\U0001f600"),
        ("\ufeff[1]".encode(), [1]),
        ("1" * 300, int("1" * 300)),
    ],
)
def test_texts_that_are_parsed_can_be_written(text: str | bytes, value: JsonValue) -> None:
    found = parse_json(text)
    assert found == value
    json.dumps(found, ensure_ascii=False).encode()


def test_lines_are_appended_behind_one_that_a_killed_writer_left(tmp_path: Path) -> None:
    path = tmp_path / "new" / "lines.jsonl"
    assert append_lines(path, "a\n") == 2
    assert append_lines(path, "é\nc\n") == 7
    path.write_bytes(path.read_bytes()[:-1])
    append_lines(path, "d\n")
    assert path.read_text() == "a\né\nc\nd\n"

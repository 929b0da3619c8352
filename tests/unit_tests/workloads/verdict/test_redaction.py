"""Secrets are taken out of the files of a run, and nothing else changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pytest_megatron.runs import redact as redaction
from pytest_megatron.runs.redact import Redactor, redact_tree

WORD = "plantedSecret"
REDACTOR = Redactor.of({"MY_TOKEN": WORD, "PIN_KEY": "123456"})


def test_texts_lose_the_secret_and_nothing_else(tmp_path: Path) -> None:
    text = f"a\r\nkey {WORD}\n\xff bytes\n".encode("latin-1")
    log = tmp_path / "logs/0/stdout.log"
    log.parent.mkdir(parents=True)
    log.write_bytes(text)
    log.chmod(0o640)
    assert redact_tree(tmp_path, REDACTOR) == ()
    assert log.read_bytes() == text.replace(WORD.encode(), b"***")
    assert log.stat().st_mode & 0o777 == 0o640
    assert [path.name for path in log.parent.iterdir()] == ["stdout.log"]


def test_numbers_of_json_stay_numbers(tmp_path: Path) -> None:
    content = {"loss": 5.123456, "n": 123456, "pin": "123456", WORD: [WORD]}
    (tmp_path / "a.json").write_text(json.dumps(content))
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(content) + "\n" for _ in range(2)))
    redact_tree(tmp_path, REDACTOR)
    expected = {"loss": 5.123456, "n": 123456, "pin": "***", "***": ["***"]}
    assert json.loads((tmp_path / "a.json").read_text()) == expected
    lines = (tmp_path / "b.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [expected, expected]


def test_binary_files_keep_their_length(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"\0\1" + WORD.encode() + b"\2")
    redact_tree(tmp_path, REDACTOR)
    assert (tmp_path / "x.bin").read_bytes() == b"\0\1" + b"*" * len(WORD) + b"\2"


def test_files_without_a_secret_and_checkpoints_are_not_touched(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    paths = [tmp_path / "sound.log", tmp_path / "checkpoints/model.pt"]
    paths[0].write_text("https://example.org is no secret\n")
    paths[1].write_text(WORD)
    before = [path.stat().st_ino for path in paths]
    (tmp_path / "outside.log").symlink_to("/etc/passwd")
    redact_tree(tmp_path, REDACTOR)
    assert paths[1].read_text() == WORD
    assert paths[1].stat().st_ino == before[1]
    assert (tmp_path / "outside.log").is_symlink()


def test_a_secret_across_two_pieces_of_a_large_log_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redaction, "_PIECE_BYTES", 64)
    for start in range(50, 70):
        for name, text in (("word", WORD), ("url", "https://me:hidden@host")):
            log = tmp_path / f"{name}{start}.log"
            log.write_text("." * start + text + "." * 100)
    redact_tree(tmp_path, REDACTOR)
    texts = [path.read_text() for path in tmp_path.iterdir()]
    assert [text for text in texts if WORD in text or "hidden" in text or "***" not in text] == []

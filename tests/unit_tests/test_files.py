from __future__ import annotations

import json
from pathlib import Path

import pytest

from pytest_megatron.files import write_json_atomically, write_text_atomically


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

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import recorded_runs
from recorded_runs import ENTRY

from pytest_megatron.runs.history import (
    History,
    append,
    known_items,
    read,
)


def test_what_is_appended_is_read(tmp_path: Path) -> None:
    path = tmp_path / "new" / "history.jsonl"
    assert read(path) == History()
    for entry in (ENTRY, replace(ENTRY, commit=None, causes=("dns",))):
        append(path, [entry])
    assert read(path).entries == (ENTRY, replace(ENTRY, commit=None, causes=("dns",)))


def test_keys_that_earlier_versions_wrote_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    earlier = {"num_devices": 8, "attempts_s": 1.5, "scope": "L0", "owners": ["team"]}
    path.write_text(json.dumps({**json.loads(ENTRY.as_line()), **earlier}) + "\n")
    assert read(path) == History(entries=(ENTRY,))


def test_a_broken_line_costs_that_line_alone(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    path.write_bytes(b"\xff\n[1]\n" + ENTRY.as_line().encode() + b'{"schema": 1, "tim')
    append(path, [ENTRY])
    found = read(path)
    assert found.entries == (ENTRY, ENTRY)
    said = [f"{path}:{line}: is no entry of a history, skipped" for line in (1, 2, 4)]
    assert found.problems == tuple(said)


@pytest.mark.parametrize("seconds", ["NaN", "Infinity", "1" * 5000, "1" * 305 + ".0e9"])
def test_a_duration_that_is_no_number_costs_its_line(tmp_path: Path, seconds: str) -> None:
    path = tmp_path / "history.jsonl"
    found = f'"duration_s": {ENTRY.duration_s}'
    assert found in ENTRY.as_line()
    path.write_text(ENTRY.as_line().replace(found, f'"duration_s": {seconds}') + ENTRY.as_line())
    assert read(path).entries == (ENTRY,)
    assert read(path).problems == (f"{path}:1: is no entry of a history, skipped",)


def test_the_items_of_a_file_are_known_without_reading_all_of_it(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    assert known_items(path) == frozenset()
    names = {"test_a.py::test_b", 'test_a.py::test_c["\u00e9\\\\"]', "test_a.py::test_d[\t]"}
    append(path, [replace(ENTRY, node_id=name) for name in names for _ in range(2)])
    assert known_items(path) == names


def test_several_sessions_append_at_once(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[2])\n"
        "from pytest_megatron.runs.history import append; from recorded_runs import ENTRY\n"
        "for _ in range(50): append(Path(sys.argv[1]), [ENTRY])"
    )
    path = tmp_path / "history.jsonl"
    command = [sys.executable, "-c", code, str(path), str(Path(recorded_runs.__file__).parent)]
    for process in [subprocess.Popen(command) for _ in range(3)]:
        assert process.wait() == 0
    assert (len(read(path).entries), read(path).problems) == (150, ())


def test_a_full_file_keeps_its_newer_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pytest_megatron.runs.history.MAX_BYTES", 4000)
    path = tmp_path / "history.jsonl"
    for day in range(1, 29):
        append(path, [replace(ENTRY, run=f"r{day}")])
    found = read(path)
    assert (found.problems, found.entries[-1].run) == ((), "r28")
    assert 2 <= len(found.entries) < 20
    assert path.stat().st_size <= 4000

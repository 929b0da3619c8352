"""Several goldens are replaced together or not at all; of a killed refresh each file is whole.

Megatron-LM moves one file after another into place, without a lock.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_megatron.base.files import write_texts_together
from pytest_megatron.errors import GoldenError
from pytest_megatron.workloads.golden.store import read_golden
from pytest_megatron.workloads.refresh.write import locked

GUEST = Path(__file__).parents[2] / "guests" / "killed_refresh.py"
OLD = {"a.json": "old a.json", "b.json": "old b.json"}
NEW = {"a.json": "new a.json", "b.json": "new b.json", "new/c.json": "new c.json"}
A, B = Path("golden_values/m/a.json"), Path("golden_values/m/b.json")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "golden_values" / "m").mkdir(parents=True)
    for target in (A, B):
        (tmp_path / target).write_text(f"old {target.name}")
    return tmp_path


def replace(root: Path, texts: dict[Path, str]) -> None:
    with locked(root):
        write_texts_together({root / target: text for target, text in texts.items()})


def contents(root: Path) -> dict[str, str]:
    files = (root / "golden_values").rglob("*")
    return {p.relative_to(root).as_posix(): p.read_text() for p in files if p.is_file()}


def test_a_kill_before_any_file_operation_leaves_each_file_whole(tmp_path: Path) -> None:
    """SIGKILL of the refresh at every step; the same refresh again ends it."""
    command = [sys.executable, str(GUEST), str(tmp_path / "project")]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    for one in found:
        files = one["files"]
        assert all(text in (OLD.get(name), NEW[name]) for name, text in files.items()), one
        assert files.keys() >= OLD.keys(), one
        assert one["again"] == NEW
    sides = [sum(one["files"].get(name) == text for name, text in NEW.items()) for one in found]
    assert (sides[0], sides[-1]) == (0, len(NEW))
    assert sides == sorted(sides)
    assert len(found) > 10


def test_a_target_that_is_no_file_leaves_every_file_as_it_was(root: Path) -> None:
    (root / "golden_values" / "z.json").mkdir()
    before = contents(root)
    with pytest.raises(IsADirectoryError):
        replace(root, {A: "new", Path("golden_values/z.json"): "new"})
    assert contents(root) == before


@pytest.mark.parametrize("error", [OSError("no"), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
def test_a_rename_that_fails_brings_back_what_was_renamed(
    root: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    before, rename = contents(root), Path.replace

    def replaced(path: Path, target: Path) -> Path:
        if target.name == "c.json":
            raise error
        return rename(path, target)

    monkeypatch.setattr(Path, "replace", replaced)
    with pytest.raises(type(error)):
        replace(root, {A: "new a", Path("golden_values/m/n.json"): "n", A.with_name("c.json"): "c"})
    assert contents(root) == before


def test_a_golden_keeps_no_second_name_and_has_the_usual_mode(root: Path) -> None:
    replace(root, {A: "new a"})
    assert contents(root) == {str(A): "new a", str(B): "old b.json"}
    found = (root / A).stat()
    assert (found.st_nlink, stat.S_IMODE(found.st_mode)) == (1, stat.S_IMODE(0o666 & ~_umask()))


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


def _remounted(disk: Path) -> list[str]:
    return ["mount", "-o", "remount,ro", str(disk)]


def test_a_full_disk_leaves_every_file_as_it_was(small_disk: Path) -> None:
    (small_disk / "golden_values" / "m").mkdir(parents=True)
    for target in (A, B):
        (small_disk / target).write_text("old")
    before = contents(small_disk)
    with pytest.raises(OSError, match="No space left"):
        replace(small_disk, {A: "new", B: "x" * (64 << 10), Path("golden_values/c"): "n"})
    assert contents(small_disk) == before
    replace(small_disk, {A: "new"})
    assert (small_disk / A).read_text() == "new"


def test_a_file_system_that_cannot_be_written_is_told_and_left_alone(small_disk: Path) -> None:
    (small_disk / "golden_values" / "m").mkdir(parents=True)
    (small_disk / A).write_text("old")
    subprocess.run(_remounted(small_disk), check=True)
    with pytest.raises(OSError, match="Read-only file system"):
        replace(small_disk, {A: "new"})
    assert contents(small_disk) == {str(A): "old"}


def test_refreshes_side_by_side_leave_one_whole_set_after_another(root: Path) -> None:
    """Four processes, twenty sets each: what is there at the end is of one process and set."""
    program = (
        "import sys; from pathlib import Path\n"
        "from pytest_megatron.base.files import write_texts_together\n"
        "from pytest_megatron.workloads.refresh.write import locked\n"
        "root = Path(sys.argv[1])\n"
        "for n in range(20):\n"
        "    with locked(root):\n"
        "        texts = {root / f'golden_values/m/{x}.json': f'{sys.argv[2]} {n}' for x in 'ab'}\n"
        "        write_texts_together(texts)\n"
    )
    command = [sys.executable, "-c", program, str(root)]
    running = [subprocess.Popen([*command, str(number)]) for number in range(4)]
    seen = set()
    while any(process.poll() is None for process in running):
        with locked(root):
            seen.add(tuple(contents(root).values()))
    assert [process.wait() for process in running] == [0] * 4
    assert {a.split(".")[0] for a, b in seen if a != b} <= {"old a"}
    assert len(set(contents(root).values())) == 1


def test_a_lock_that_is_held_for_too_long_is_one_clear_error(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pytest_megatron.workloads.refresh.write._LOCK_WAIT_S", 0.05)
    with locked(root), pytest.raises(GoldenError, match="another refresh has held the goldens"):
        replace(root, {A: "new"})
    with pytest.raises(GoldenError, match="no such file"):
        read_golden(root / "none.json")

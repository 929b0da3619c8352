"""Several goldens are replaced together or not at all, whoever dies and whatever the disk does.

Megatron-LM moves one file after another into place, without a lock.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path, PurePosixPath

import pytest

from pytest_megatron.errors import GoldenError
from pytest_megatron.runs.layout import OWN_DIR
from pytest_megatron.workloads.golden.store import read_golden
from pytest_megatron.workloads.refresh.transaction import LOCK, locked, recover, replace_together

GUEST = Path(__file__).parents[2] / "guests" / "killed_refresh.py"
OLD = {"a.json": "old a.json", "b.json": "old b.json"}
NEW = {"a.json": "new a.json", "b.json": "new b.json", "new": "", "new/c.json": "new c.json"}
A, B = PurePosixPath("golden_values/m/a.json"), PurePosixPath("golden_values/m/b.json")


def kill_at_every_operation(root: Path, mode: str) -> list[dict[str, object]]:
    done = subprocess.run(
        [sys.executable, str(GUEST), str(root), mode], check=True, capture_output=True, text=True
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "golden_values" / "m").mkdir(parents=True)
    for target in (A, B):
        (tmp_path / target).write_text(f"old {target.name}")
    return tmp_path


def replace(root: Path, texts: dict[PurePosixPath, str]) -> None:
    with locked(root):
        replace_together(root, texts)


def contents(root: Path) -> dict[str, str]:
    files = (root / "golden_values").rglob("*")
    return {p.relative_to(root).as_posix(): p.read_text() for p in files if p.is_file()}


def journals(root: Path) -> list[str]:
    return [p.name for p in (root / OWN_DIR).glob("goldens.*.json")]


@pytest.mark.parametrize("mode", ["once", "recovery"])
def test_a_kill_before_any_file_operation_leaves_the_old_set_or_the_new_one(
    tmp_path: Path, mode: str
) -> None:
    """SIGKILL of the refresh, and with `recovery` of whoever ends it as well, at every step."""
    found = kill_at_every_operation(tmp_path / "project", mode)
    assert [d for d in found if d["files"] not in (OLD, NEW) or d["left"]] == []
    sides = [d["files"] == NEW for d in found]
    assert (sides[0], sides[-1]) == (False, True)
    assert sides == sorted(sides)  # from one operation on it is the new one
    assert len({d["at"] for d in found}) > 25


def test_a_kill_while_a_failed_refresh_is_undone_leaves_the_old_set(tmp_path: Path) -> None:
    found = kill_at_every_operation(tmp_path / "project", "undo")
    assert [d for d in found if d["files"] != {**OLD, "c.json": ""} or d["left"]] == []
    assert len(found) > 25


def test_a_target_that_is_no_file_leaves_every_file_as_it_was(root: Path) -> None:
    (root / "golden_values" / "z.json").mkdir()
    before = contents(root)
    with pytest.raises(IsADirectoryError):
        replace(root, {A: "new", PurePosixPath("golden_values/z.json"): "new"})
    assert (contents(root), journals(root)) == (before, [])


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
        replace(small_disk, {A: "new", B: "x" * (64 << 10), PurePosixPath("golden_values/c"): "n"})
    assert (contents(small_disk), journals(small_disk)) == (before, [])
    replace(small_disk, {A: "new"})
    assert (small_disk / A).read_text() == "new"


def test_a_file_system_that_cannot_be_written_is_told_and_left_alone(small_disk: Path) -> None:
    (small_disk / "golden_values" / "m").mkdir(parents=True)
    (small_disk / A).write_text("old")
    subprocess.run(_remounted(small_disk), check=True)
    with pytest.raises(OSError, match="Read-only file system"):
        replace(small_disk, {A: "new"})
    assert contents(small_disk) == {str(A): "old"}


def test_a_reader_that_cannot_end_a_killed_refresh_says_so(small_disk: Path) -> None:
    (small_disk / OWN_DIR).mkdir()
    (small_disk / OWN_DIR / "goldens.replacing.json").write_text("{}")
    subprocess.run(_remounted(small_disk), check=True)
    with pytest.raises(GoldenError, match="was interrupted and cannot be ended: Read-only file"):
        recover(small_disk)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "is no journal of a refresh"),
        ('{"entries": [{"target": "../x", "has_old": true}], "made": []}', "leads out of the"),
        ('{"entries": [], "made": ["/etc"]}', "leads out of the project"),
    ],
)
def test_a_journal_that_is_none_of_ours_is_one_clear_error(
    root: Path, text: str, problem: str
) -> None:
    (root / OWN_DIR).mkdir()
    (root / OWN_DIR / "goldens.replacing.json").write_text(text)
    with pytest.raises(GoldenError, match=problem):
        recover(root)


def test_refreshes_side_by_side_leave_one_whole_set_after_another(root: Path) -> None:
    """Four processes, twenty sets each: what is there at the end is of one process and set."""
    program = (
        "import sys; from pathlib import Path, PurePosixPath as P\n"
        "from pytest_megatron.workloads.refresh.transaction import locked, replace_together\n"
        "for n in range(20):\n"
        "    with locked(Path(sys.argv[1])):\n"
        "        texts = {P(f'golden_values/m/{x}.json'): f'{sys.argv[2]} {n}' for x in 'ab'}\n"
        "        replace_together(Path(sys.argv[1]), texts)\n"
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


def test_a_lock_outlives_nobody(root: Path) -> None:
    program = (
        "import sys, signal; from pathlib import Path\n"
        "from pytest_megatron.workloads.refresh.transaction import locked\n"
        "with locked(Path(sys.argv[1])):\n"
        "    print('up', flush=True); signal.pause()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(root)], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "up\n"
        holder.send_signal(signal.SIGKILL)
        assert holder.wait() == -signal.SIGKILL
    replace(root, {A: "new"})
    assert (root / LOCK).exists()


def test_a_lock_that_is_held_for_too_long_is_one_clear_error(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pytest_megatron.workloads.refresh.transaction._LOCK_WAIT_S", 0.05)
    with locked(root), pytest.raises(GoldenError, match="another refresh has held the goldens"):
        replace(root, {A: "new"})
    with pytest.raises(GoldenError, match="no such file"):
        read_golden(root / "none.json")

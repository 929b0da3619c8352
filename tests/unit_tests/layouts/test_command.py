"""`pytest-megatron layout` and `--fake-ranks`, with real ranks of a small program."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_project import Project

pytestmark = pytest.mark.nightly

GUEST = Path(__file__).parents[1] / "guests" / "fake_layout.py"
MAIN = [sys.executable, "-c", "from pytest_megatron.cli import main; main()"]


def layout(directory: Path, *words: str) -> tuple[int, str]:
    command = [*MAIN, "layout", "--dir", str(directory), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.returncode, done.stdout


@pytest.mark.everyday
def test_a_message_that_is_never_sent_is_found_at_64_ranks(tmp_path: Path) -> None:
    words = ("--fake-ranks", "0,32", "-n", "64", str(GUEST), "--fault")
    code, text = layout(tmp_path / "bad", *words, "unsent")
    assert code == 1
    assert text.startswith(
        "message 5 from rank 0 to rank 32, recv of float32 [2, 4] in step 1, is awaited by rank "
        "32 and never sent by rank 0\n"
    )
    assert "fake_layout.py:27 in <module>" in text


def test_a_sound_program_agrees_and_one_that_asks_others_is_not_decided(tmp_path: Path) -> None:
    words = ("--fake-ranks", "0,1,32", "-n", "64", "--format", "json", str(GUEST), "--fault")
    code, text = layout(tmp_path / "sound", *words)
    found = json.loads(text)
    assert (code, found["faults"], found["undecided"]) == (0, [], [])
    assert [rank["micro_batches"] for rank in found["ranks"]] == [[6]] * 3
    assert found["ranks"][0]["parameters"] == 80
    code, text = layout(tmp_path / "data", *words, "data")
    found = json.loads(text)
    assert (code, found["faults"]) == (1, [])
    assert "hangs on what other ranks have sent" in found["undecided"][0]["text"]
    assert "fake_layout.py:38" in found["undecided"][0]["text"]


def test_a_call_after_the_last_step_of_a_rank_that_the_program_names_is_found(
    tmp_path: Path,
) -> None:
    words = ("--format", "json", "-n", "64", str(GUEST), "--fault")
    code, text = layout(tmp_path / "late", *words, "late")
    (fault,) = json.loads(text)["faults"]
    assert (code, fault["kind"], fault["ranks"]) == (1, "collective", [5, 0])
    assert "fake_layout.py:34 in <module>" in fault["lines"][0][1]
    code, text = layout(tmp_path / "all", "--fake-ranks", "0,32", *words, "later")
    found = json.loads(text)
    assert (code, found["faults"]) == (0, [])
    assert [(rank["end"], rank["micro_batches"]) for rank in found["ranks"]] == [
        ("cut", [3, 3])
    ] * 2


def test_objects_reach_ranks_that_ran_before_their_sender(tmp_path: Path) -> None:
    words = ("--fake-ranks", "0,1,32", "-n", "64", "--format", "json", str(GUEST), "--fault")
    code, text = layout(tmp_path / "objects", *words, "objects")
    found = json.loads(text)
    assert (code, found["faults"], found["undecided"]) == (0, [], [])
    assert [rank["end"] for rank in found["ranks"]] == ["whole"] * 3


def test_a_row_for_gpus_runs_here_and_its_record_has_the_ranks(tmp_path: Path) -> None:
    project = Project(root=tmp_path, gpus=8, has_torch=True)
    (tmp_path / "train.py").write_text(GUEST.read_text())
    for name, fault in (("sound", None), ("size", "size")):
        case = project.case(name, fault=[fault] if fault else None)
        project.row(case, write_golden=False, platforms=["dgx_h100"])
    run = project.run("recipes", "--fake-ranks=0,4,7")
    assert run.outcomes == {"sound": "PASSED", "size": "FAILED"}, run.text
    assert "collective 0 of the group [4, 5, 6, 7], in step 1, differs in size" in run.stdout
    record = run.record("sound")["layout"]
    assert isinstance(record, dict)
    assert (record["world_size"], record["faults"]) == (8, [])
    (page,) = [p for p in run.directory.glob("*/curves.html") if "size" in p.parent.name]
    text = page.read_text()
    assert text.index("differs in size") < text.index("3 of 8 ranks run")
    assert not (tmp_path / ".pytest_megatron" / "history.jsonl").exists()


def test_a_session_refuses_such_a_choice_as_the_command_does(tmp_path: Path) -> None:
    run = Project(root=tmp_path).run("recipes", "--fake-ranks=abc", run_dir="")
    assert run.returncode == 4
    assert "ERROR: --fake-ranks: 'abc' names no ranks, expected all, how many (12)" in run.text

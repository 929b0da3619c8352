"""Where logs are, and whose: every layout that launches leave."""

from __future__ import annotations

import gzip
import json
import os
import tarfile
import zipfile
from pathlib import Path

import pytest
from launches import LOST, Launch, diagnosed, iterations, told, traceback

from pytest_megatron.errors import TriageError
from pytest_megatron.runs import archives
from pytest_megatron.triage.api import triage
from pytest_megatron.triage.find import is_worth_reading

ERROR = "ValueError: bad batch"


def prefixed(prefix: str, text: str) -> str:
    return "".join(f"{prefix}{line}\n" for line in text.splitlines())


def mixed(template: str) -> str:
    """The lines of four ranks one by one, as they come: rank 2 raises, the others lose it."""
    texts = {rank: traceback(ERROR if rank == 2 else LOST).splitlines() for rank in range(4)}
    rows = zip(*texts.values(), strict=True)
    mixed_lines = [template.format(rank=r) + line for row in rows for r, line in enumerate(row)]
    start = "".join(prefixed(template.format(rank=r), iterations()) for r in range(4))
    return start + "\n".join(mixed_lines) + "\n"


@pytest.mark.parametrize(
    "template",
    [
        "[rank{rank}]: ",
        "[default{rank}]:",
        "[default{rank}]:[rank{rank}]: ",
        "{rank}: ",
        " {rank}: ",
    ],
)
def test_one_log_of_several_ranks(tmp_path: Path, template: str) -> None:
    (tmp_path / "job.log").write_text(mixed(template))
    found = diagnosed(tmp_path)
    assert (found.signature, found.root_rank, found.iteration) == ("exception", 2, 6)
    assert found.evidence[0].text == ERROR


def test_a_log_with_stamps_in_front_of_every_line(tmp_path: Path) -> None:
    text = prefixed("2026-11-21T09:22:33.1234567Z ", mixed("[rank{rank}]: "))
    (tmp_path / "job.log").write_text(text)
    assert told(tmp_path) == ("exception", 2, False)


@pytest.mark.parametrize(
    "name",
    ["slurm-41_{}.out", "log-job-{}.err", "job.{}.log", "train_rank{}.txt", "task-{}.stdout"],
)
def test_a_log_for_each_task_side_by_side(tmp_path: Path, name: str) -> None:
    for rank in range(4):
        (tmp_path / name.format(rank)).write_text(traceback(ERROR if rank == 2 else LOST))
    assert told(tmp_path) == ("exception", 2, False)


def test_numbers_of_jobs_are_no_ranks(tmp_path: Path) -> None:
    for job in (4711, 4712):
        (tmp_path / f"slurm-{job}.out").write_text(traceback(ERROR))
    (group,) = triage([tmp_path]).groups
    assert [d.root_rank for d in group.diagnoses] == [None, None]


def test_a_jobs_log_beside_those_of_its_tasks_is_the_launchers(tmp_path: Path) -> None:
    for rank in range(4):
        (tmp_path / f"slurm-41_{rank}.out").write_text(iterations())
    (tmp_path / "slurm-41.out").write_text(
        "srun: error: node1: task 3: Segmentation fault\n"
        "srun: error: node1: tasks 0-2: Terminated\n"
        "srun: launch/slurm: _step_signal: Terminating StepId=41.0\n"
    )
    found = diagnosed(tmp_path)
    assert (found.family, found.root_rank) == ("segfault", 3)
    assert found.exits == dict.fromkeys("012", "SIGTERM") | {"3": "SIGSEGV"}


def test_what_slurm_says_of_a_task_is_not_its_error(tmp_path: Path) -> None:
    for task in range(4):
        said = "usage: train.py [-h]\ntrain.py: error: unrecognized arguments: --tp 2\n"
        (tmp_path / f"task_{task}.out").write_text(said if task == 2 else "")
    (tmp_path / "slurm-41.out").write_text(
        "srun: error: n1: task 2: Exited with exit code 2\n"
        "slurmstepd: error: *** STEP 41.0 ON n1 CANCELLED AT 2026-03-01T10:00:00 ***\n"
        "srun: error: n1: tasks 0-1,3: Terminated\n"
    )
    assert told(tmp_path) == ("config", 2, False)


def test_sruns_exit_codes(tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text(
        "0: start\n1: start\nsrun: error: n1: task 1: Exited with exit code 3\n"
    )
    assert told(tmp_path) == ("exit", 1, False)


def test_ranks_of_several_nodes_are_counted_on(tmp_path: Path) -> None:
    for node in range(2):
        for local in range(2):
            directory = tmp_path / f"node_{node}" / "attempt_0" / str(local)
            directory.mkdir(parents=True)
            guilty = (node, local) == (1, 0)
            (directory / "stderr.log").write_text(traceback(ERROR if guilty else LOST))
    found = diagnosed(tmp_path)
    assert (found.root_rank, found.world_size) == (2, 4)


def test_several_launches_in_one_tree_are_grouped_by_cause(tmp_path: Path) -> None:
    for name, message in (("a", ERROR), ("b", ERROR), ("c", "KeyError: 'x'")):
        launch = Launch(root=tmp_path / name)
        launch.raises(1, message)
        launch.ends({1: 1}, first=1)
    Launch(root=tmp_path / "sound").launcher("all well\n")
    found = triage([tmp_path])
    assert [len(group.diagnoses) for group in found.groups] == [2, 1]
    assert found.num_units == 4


def test_an_error_file_alone_is_enough(tmp_path: Path) -> None:
    launch = Launch(root=tmp_path)
    launch.error_file(3, "ImportError: no apex", 1_700_000_000)
    assert told(tmp_path) == ("import", 3, False)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"message": 3}', '{"message": {"x": 1}}', "\xff"])
def test_a_torn_error_file_is_not_evidence(tmp_path: Path, text: str) -> None:
    launch = Launch(root=tmp_path)
    launch.raises(1, ERROR)
    (tmp_path / launch.directory / "3" / "error.json").write_text(text, encoding="latin-1")
    assert told(tmp_path) == ("exception", 1, False)


def test_a_log_that_ends_in_the_middle_of_a_traceback(tmp_path: Path) -> None:
    launch = Launch(root=tmp_path)
    launch.write(1, "".join(traceback(ERROR).splitlines(keepends=True)[:4]))
    launch.ends({1: -9}, first=1)
    assert told(tmp_path) == ("sigkill", 1, False)


def test_links_are_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "a.log").write_text(traceback(ERROR))
    inside = tmp_path / "inside"
    Launch(root=inside).launcher("well\n")
    (inside / "linked.log").symlink_to(outside / "a.log")
    (inside / "linked").symlink_to(outside)
    assert triage([inside]).groups == ()


@pytest.mark.parametrize("suffix", [".zip", ".tar", ".tar.gz", ".tgz"])
def test_an_artifact(tmp_path: Path, suffix: str) -> None:
    launch = Launch(root=tmp_path / "run")
    launch.raises(2, ERROR)
    launch.ends({2: 1}, first=2)
    path = tmp_path / f"artifact{suffix}"
    if suffix == ".zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
            for file in launch.root.rglob("*.log"):
                packed.write(file, file.relative_to(launch.root))
    else:
        with tarfile.open(path, "w:gz" if "gz" in suffix else "w") as tar:
            tar.add(launch.root, "run")
    found = diagnosed(path)
    assert (found.signature, found.root_rank) == ("exception", 2)
    assert found.evidence[0].file.startswith(f"{path}!")
    assert found.evidence[0].file.endswith("logs/none_x/attempt_0/2/stderr.log")


def refusal(path: Path) -> str:
    with pytest.raises(TriageError) as caught:
        triage([path])
    return str(caught.value)


def test_a_packed_log_that_is_a_bomb_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bomb.log.gz"
    path.write_bytes(gzip.compress(b"x" * (80 << 20), compresslevel=9))
    assert "which no log does" in refusal(path) or "is longer than" in refusal(path)


def test_what_is_not_unpacked_may_be_of_any_ratio(tmp_path: Path) -> None:
    path = tmp_path / "run.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("checkpoints/0.distcp", bytes(80 << 20))
        packed.writestr("0.log", "all is well")
    (tmp_path / "out").mkdir()
    archives.unpack(path, tmp_path / "out", is_worth_reading)
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["0.log"]


def test_a_member_that_is_longer_than_it_says_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("a.log", "x" * 5000)
    data = bytearray(path.read_bytes())
    for mark, shift in ((b"PK\x01\x02", 24), (b"PK\x03\x04", 22)):
        at = data.index(mark) + shift
        data[at : at + 4] = (10).to_bytes(4, "little")
    path.write_bytes(data)
    assert "cannot be unpacked" in refusal(path) or "is longer than" in refusal(path)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.zip", b"PK\x03\x04 and no more", "is no zip and no tar, in spite of its name"),
        ("a.tar", b"nothing", "is no zip and no tar, in spite of its name"),
        ("a.gz", b"\x1f\x8b\x08broken", "cannot be unpacked"),
        ("a.log", b"\0\1\2", "is no text, expected a log, a directory, a zip or a tar"),
    ],
)
def test_a_file_that_is_not_what_its_name_says(
    tmp_path: Path, name: str, content: bytes, expected: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    assert refusal(path).startswith(f"{path}")
    assert expected in refusal(path)


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    assert refusal(tmp_path / "no") == f"{tmp_path}/no: no such file or directory"


def test_a_directory_without_logs(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")
    assert "holds no log: expected files such as" in refusal(tmp_path)


def test_an_empty_log_is_nothing_that_failed(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("")
    assert triage([tmp_path]).groups == ()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_log_that_may_not_be_read_is_noted(tmp_path: Path) -> None:
    launch = Launch(root=tmp_path)
    launch.raises(1, ERROR)
    locked = tmp_path / launch.directory / "2" / "stderr.log"
    locked.chmod(0)
    (group,) = triage([tmp_path]).groups
    assert group.first.notes == (f"{locked}: Permission denied",)


def test_a_golden_that_disagrees_is_found_in_a_run_directory(tmp_path: Path) -> None:
    """It is never transient."""
    item = tmp_path / "gpt-tp1-abc"
    Launch(root=item / "repeat_1/attempt_1/phase_1", directory="logs").launcher("well\n")
    row = {"metric": "lm loss", "passed": False, "first_step": 7}
    repeats = [{"repeat": 1, "against": "golden", "comparisons": [row]}]
    (item / "comparison.json").write_text(json.dumps({"passed": False, "repeats": repeats}))
    found = diagnosed(tmp_path)
    assert (found.family, found.transient, found.root_rank) == (
        *("golden_mismatch", False),
        None,
    )
    assert found.text == (
        "The program trained to the end, but its metrics disagree: lm loss from step 7 on."
    )


def test_what_gpus_said_explains_a_failure_in_a_run_directory(tmp_path: Path) -> None:
    attempt = tmp_path / "gpt-tp1-abc/repeat_1/attempt_1"
    launch = Launch(root=attempt / "phase_1", directory="logs")
    launch.raises(2, "RuntimeError: CUDA error: an illegal memory access was encountered")
    launch.ends({2: 1}, first=2)
    (attempt / "plan.json").write_text(
        json.dumps({"node_id": "recipes/x.yaml::y", "world_size": 4})
    )
    fault = {"gpu": "GPU-1", "signature": "gpu_lost", "text": "GPU 1 has fallen off the bus"}
    (attempt / "health.json").write_text(json.dumps({"schema": 1, "faults": []}))
    assert told(tmp_path) == ("illegal_access", 2, False)
    (attempt / "health.json").write_text(json.dumps({"schema": 1, "faults": [fault]}))
    assert told(tmp_path) == ("off_bus", 2, True)

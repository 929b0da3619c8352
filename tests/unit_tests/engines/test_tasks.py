"""Job steps of several tasks: real processes with Slurm's variables, on one machine."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest

from pytest_megatron.runs.layout import AttemptDirs
from pytest_megatron.runs.record import RecordedDiagnosis
from pytest_megatron.triage.api import triage
from pytest_megatron.triage.rank_log import End
from pytest_megatron.workloads.engine.api import TroubleKind
from pytest_megatron.workloads.engine.records import JobRecord, JobSpec, read_record, write_spec
from pytest_megatron.workloads.recipe.case import Launcher
from pytest_megatron.workloads.training.plan.plan import (
    AttemptPlan,
    PhasePlan,
    Ranks,
    start_words,
    started,
)

pytestmark = pytest.mark.nightly

GUEST = Path(__file__).parents[1] / "guests" / "task_rank.py"
DEADLINE_S = 60.0
MARK = "PYTEST_MEGATRON_GUEST_OF"


@dataclass
class Step:
    """A step that runs: its tasks, and what they leave."""

    root: Path
    tasks: list[subprocess.Popen[bytes]]

    @property
    def dirs(self) -> AttemptDirs:
        return AttemptDirs(root=self.root / "attempt_1")

    @property
    def logs(self) -> Path:
        return self.dirs.phase(1).logs

    @property
    def launcher_log(self) -> str:
        return self.dirs.phase(1).launcher_log.read_text()

    def record(self) -> JobRecord:
        """Wait for every task to end; return what task 0 says."""
        for task in self.tasks:
            task.wait(timeout=DEADLINE_S)
        found = read_record(self.root / "outcome.json")
        assert found is not None
        return found

    def shown(self, rank: int, name: str) -> str:
        return json.loads((self.root / "meeting" / f"{rank}.json").read_text())[name]  # type: ignore[no-any-return]

    def wait_until_met(self, num_ranks: int) -> None:
        pattern = "srun_native/attempt_0/*/stdout.log"
        wait_for(
            lambda: (
                sum("has met" in path.read_text() for path in self.logs.glob(pattern)) == num_ranks
            )
        )

    def lose(self, task: int) -> None:
        """Kill a task, and end the others as `srun --kill-on-bad-exit` does."""
        self.tasks[task].kill()
        self.tasks[task].wait(timeout=DEADLINE_S)
        for other in self.tasks:
            other.terminate()

    def alive(self) -> list[int]:
        return [p.pid for p in psutil.process_iter() if mark_of(p) == str(self.root)]


def mark_of(process: psutil.Process) -> str | None:
    try:
        return process.environ().get(MARK)
    except psutil.Error:
        return None


def wait_for(is_so: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < give_up_at
        time.sleep(0.01)


def plan_of(root: Path, deeds: tuple[str, ...], num_nodes: int, per_node: int) -> AttemptPlan:
    dirs = AttemptDirs(root=root / "attempt_1")
    phase = dirs.phase(1)
    ranks = Ranks(
        starter=Launcher.TORCHRUN,
        num_nodes=num_nodes,
        per_node=per_node,
        tee_ranks=(0, 3),
        logs=phase.logs,
    )
    start = started(sys.executable, ranks, str(GUEST), [str(root / "meeting"), *deeds])
    own = {"OWN": "a b $HOME 'c'", "PYTHONFAULTHANDLER": "1"}
    only = PhasePlan(
        number=1,
        argv=start_words(start),
        env=own,
        own_env=own,
        dirs=phase,
        last_iteration=None,
        world_size=ranks.world_size,
        num_nodes=num_nodes,
        start=start,
    )
    return AttemptPlan(
        phases=(only,),
        dirs=dirs,
        cwd=root,
        world_size=ranks.world_size,
        time_limit_s=DEADLINE_S,
    )


def spec_of(root: Path, plan: AttemptPlan, **options: str) -> JobSpec:
    return JobSpec(
        key="item/repeat_1/attempt_1",
        plan=plan,
        outcome=root / "outcome.json",
        root=root,
        description="{}",
        env={},
        watches_gpus=False,
        options=options,
    )


def task_env(root: Path, task: int, num_nodes: int, per_node: int) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "MASTER_"))}
    return kept | {
        MARK: str(root),
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(task),
        "SLURM_LOCALID": str(task % per_node),
        "SLURM_NODEID": str(task // per_node),
        "SLURM_STEP_NUM_TASKS": str(num_nodes * per_node),
        "SLURM_STEP_NUM_NODES": str(num_nodes),
        "SLURM_STEP_NODELIST": "localhost,node1",
        "SLURM_STEP_TASKS_PER_NODE": f"{per_node}(x{num_nodes})",
        "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
    }


@contextmanager
def step(
    root: Path,
    spec: JobSpec,
    num_nodes: int,
    per_node: int,
    **more: str,
) -> Iterator[Step]:
    path = root / "spec.json"
    write_spec(path, spec)
    command = [sys.executable, "-m", "pytest_megatron.engines.worker", str(path)]
    tasks = []
    for task in range(num_nodes * per_node):
        env = task_env(root, task, num_nodes, per_node) | more
        with (root / f"task_{task}.log").open("wb") as log:
            tasks.append(subprocess.Popen(command, env=env, cwd=root, stdout=log, stderr=log))
    found = Step(root=root, tasks=tasks)
    try:
        yield found
        wait_for(lambda: not found.alive())
        left = {path.name for path in root.glob("tasks-*/*")}
        assert left == {"over"} or tasks[0].returncode != 0
    finally:
        for process in tasks:
            process.kill()
            process.wait()


def native(root: Path, *deeds: str, per_node: int = 1, **options: str) -> JobSpec:
    """Two nodes with so many ranks each, which srun starts."""
    return spec_of(root, plan_of(root, deeds, 2, per_node), mode="srun-native", **options)


def paused(root: Path, per_node: int = 1) -> JobSpec:
    return native(root, *(f"pause@{rank}" for rank in range(4)), per_node=per_node)


@pytest.mark.everyday
def test_ranks_of_srun_know_their_place_and_log_as_those_of_torchrun_do(tmp_path: Path) -> None:
    of_another = {"RANK": "7", "WORLD_SIZE": "8", "MASTER_ADDR": "203.0.113.1"}
    with step(tmp_path, native(tmp_path, per_node=2), 2, 2, **of_another) as found:
        record = found.record()
    (end,) = record.ends
    assert (end.end, end.returncode, end.num_left, record.trouble) == (End.EXITED, 0, 0, None)
    assert record.hosts == ("localhost", "node1")
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_PROCID")
    assert [[found.shown(rank, name) for name in names] for rank in range(4)] == [
        ["0", "0", "4", "2", "0"],
        ["1", "1", "4", "2", "1"],
        ["2", "0", "4", "2", "2"],
        ["3", "1", "4", "2", "3"],
    ]
    assert {found.shown(rank, "MASTER_ADDR") for rank in range(4)} == {"localhost"}
    assert {found.shown(rank, "OWN") for rank in range(4)} == {"a b $HOME 'c'"}
    assert [path.name for path in sorted(found.logs.iterdir())] == ["0", "1", "2", "3"]
    assert (found.logs / "3" / "stdout.log").read_text() == "rank 3 has met 4\n"
    lines = sorted(found.launcher_log.splitlines())
    assert lines == ["[default0]:rank 0 has met 4", "[default3]:rank 3 has met 4"]


def failure_of(found: Step) -> RecordedDiagnosis:
    (group,) = triage([found.dirs.phase(1).root]).groups
    return group.first


def test_a_rank_that_raises_ends_those_that_wait_for_it(tmp_path: Path) -> None:
    with step(tmp_path, native(tmp_path, "pause@0", "raise@1"), 2, 1) as found:
        record = found.record()
    (end,) = record.ends
    assert (end.end, end.returncode, record.trouble) == (End.EXITED, 1, None)
    failure = failure_of(found)
    assert (failure.root_rank, failure.exits["1"]) == (1, "exit code 1")
    assert "rank 1 of 2 raised ValueError: as it was told at " in failure.headline
    lines = [line for line in found.launcher_log.splitlines() if line.startswith("[nodes]")]
    assert lines[0] == "[nodes]: rank 0 (localhost) did not end by itself and is stopped"
    assert lines[1].startswith("[nodes]: rank 1 (node1) failed (exitcode: 1) local_rank: 1 (pid: ")


@pytest.mark.everyday
def test_a_rank_that_is_killed_is_the_first_whatever_the_others_say(tmp_path: Path) -> None:
    with step(tmp_path, native(tmp_path, "leave@0", "kill@1"), 2, 1) as found:
        record = found.record()
    assert [(end.end, end.returncode) for end in record.ends] == [(End.EXITED, 1)]
    failure = failure_of(found)
    assert (failure.root_rank, failure.exits["1"]) == (1, "SIGKILL")


def test_a_rank_that_leaves_early_is_no_success(tmp_path: Path) -> None:
    with step(tmp_path, native(tmp_path, "leave@0", "exit0@1"), 2, 1) as found:
        record = found.record()
    assert [(end.end, end.returncode) for end in record.ends] == [(End.EXITED, 1)]
    assert failure_of(found).exits == {"0": "exit code 7"}


def test_a_hang_leaves_the_stacks_of_the_ranks_of_every_node(tmp_path: Path) -> None:
    with step(tmp_path, native(tmp_path, "pause@0", "hang@1"), 2, 1) as found:
        record = found.record()
    (end,) = record.ends
    assert (end.end, end.hung_rank, end.num_left) == (End.HUNG_COLLECTIVE, 1, 0)
    stacks = [(found.logs / str(rank) / "stderr.log").read_text() for rank in range(2)]
    assert all("task_rank.py" in text and "in pause" in text for text in stacks)
    assert "failed" not in found.launcher_log  # nobody failed: it was stopped


def test_nothing_outlives_task_0(tmp_path: Path) -> None:
    with step(tmp_path, paused(tmp_path), 2, 1) as found:
        found.wait_until_met(2)
        found.lose(0)
        codes = [task.wait(timeout=DEADLINE_S) for task in found.tasks]
    assert codes == [-signal.SIGKILL, 1]
    assert not (tmp_path / "outcome.json").exists()


def test_the_end_of_a_whole_job_still_leaves_an_outcome(tmp_path: Path) -> None:
    with step(tmp_path, paused(tmp_path), 2, 1) as found:
        found.wait_until_met(2)
        for task in found.tasks:
            task.terminate()
        record = found.record()
    assert record.trouble is not None
    assert (record.trouble.kind, record.trouble.hosts) == (TroubleKind.CANCELLED, ())
    assert record.trouble.text.startswith("the job was told to end by SIGTERM on ")
    assert (found.logs / "srun_native/attempt_0/1/stdout.log").read_text() == "rank 1 has met 2\n"


def test_phases_follow_one_another_and_scripts_run_on_task_0_alone(tmp_path: Path) -> None:
    """What BEFORE_SCRIPT exports reaches every rank; the second phase has other ranks and ports."""
    spec = native(tmp_path)
    (first,) = spec.plan.phases
    assert first.start is not None
    words = [str(tmp_path / "second"), "raise@1"]
    dirs = spec.plan.dirs.phase(2)
    ranks = replace(first.start.ranks, logs=dirs.logs)
    second = replace(
        first,
        number=2,
        dirs=dirs,
        before_script=None,
        start=started(sys.executable, ranks, str(GUEST), words),
    )
    script = "export EXPORTED='of the script'; unset OTHER; echo once >> scripts"
    first = replace(first, before_script=script, after_script="echo after $EXIT_CODE >> scripts")
    spec = replace(spec, plan=replace(spec.plan, phases=(first, second)))
    with step(tmp_path, spec, 2, 1, OMP_NUM_THREADS="3") as found:
        record = found.record()
    assert [(end.plan.number, end.returncode) for end in record.ends] == [(1, 0), (2, 1)]
    assert [found.shown(rank, "EXPORTED") for rank in range(2)] == ["of the script"] * 2
    assert [found.shown(rank, "OMP_NUM_THREADS") for rank in range(2)] == ["3", "3"]
    assert (tmp_path / "scripts").read_text() == "once\nafter 0\n"
    assert (dirs.logs / "1" / "stdout.log").read_text() == "rank 1 has met 2\n"


def test_a_launcher_on_every_node_makes_one_training(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, plan_of(tmp_path, ("kill@3", "leave@2", "leave@1", "leave@0"), 2, 2))
    with step(tmp_path, spec, 2, 1) as found:
        record = found.record()
    assert [(end.end, end.returncode) for end in record.ends] == [(End.EXITED, 1)]
    failure = failure_of(found)
    assert (failure.root_rank, failure.exits["3"]) == (3, "SIGKILL")
    assert [found.shown(rank, "LOCAL_RANK") for rank in range(4)] == ["0", "1", "0", "1"]
    assert sorted(path.name for path in found.logs.iterdir()) == ["0", "1", "2", "3"]
    lines = found.launcher_log.splitlines()
    assert "[default0]:rank 0 has met 4" in lines
    assert "[default3]:rank 3 has met 4" in lines
    assert any(
        re.fullmatch(r"\[nodes\]: node 1 \(node1\) ended with exit code 1", x) for x in lines
    )
    assert not list(found.dirs.phase(1).root.glob("launcher.node*"))

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pytest_megatron.engines.config import LaunchMode
from pytest_megatron.engines.multitask.coordinator import RankExit, first_line, format_table
from pytest_megatron.engines.multitask.messages import Begin, Join, Meeting, Turn
from pytest_megatron.engines.multitask.step import begin_phase
from pytest_megatron.engines.multitask.topology import TaskPlace, find_place, find_ports
from pytest_megatron.errors import LaunchError
from pytest_megatron.runs.layout import PhaseDirs
from pytest_megatron.triage.logs.exits import LITERALS, ProcessExit, read_exits
from pytest_megatron.workloads.recipe.case import Launcher
from pytest_megatron.workloads.training.plan.plan import PhasePlan, Ranks, started

STEP = {
    "SLURM_JOB_ID": "1000",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NODELIST": "rack1-gpu[07-08],login",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
}
HERE = Join(task=0, node=0, local=0, host="node0", devices=None, given={})
ENDPOINT = ("10.0.0.1", 21000)


def members(num_nodes: int, on_node: int, **more: str) -> dict[int, Join]:
    return {
        task: replace(
            HERE,
            task=task,
            node=task // on_node,
            local=task % on_node,
            host=f"node{task // on_node}",
            given=dict(more),
        )
        for task in range(num_nodes * on_node)
    }


def phase(num_nodes: int, per_node: int, **env: str) -> PhasePlan:
    dirs = PhaseDirs(root=Path("/run/phase_1"))
    ranks = Ranks(
        starter=Launcher.TORCHRUN,
        num_nodes=num_nodes,
        per_node=per_node,
        tee_ranks=(0,),
        logs=dirs.logs,
    )
    return PhasePlan(
        number=1,
        argv=(),
        env=env,
        own_env=env,
        dirs=dirs,
        last_iteration=None,
        world_size=ranks.world_size,
        num_nodes=num_nodes,
        start=started("python", ranks, "train.py", ["--a b"]),
    )


def begin(mode: LaunchMode, plan: PhasePlan, tasks: dict[int, Join]) -> dict[int, Begin]:
    return begin_phase(mode, plan, Path("/project"), tasks, ENDPOINT, {"JOB": "1"})


def test_a_task_finds_its_place_among_nodes_of_different_sizes() -> None:
    assert find_place(STEP) == TaskPlace(
        task=3,
        node=1,
        local=1,
        on_nodes=(2, 2, 1),
        hosts=("rack1-gpu07", "rack1-gpu08", "login"),
        seed=31002,
        name="1000.2.0",
    )
    assert find_place({"SLURM_JOB_ID": "1", "SLURM_PROCID": "0"}) is None  # no step: a batch script


def test_what_slurm_says_must_fit_together() -> None:
    with pytest.raises(LaunchError, match=r"is '4' for 5 tasks on 3 nodes \(.*expected numbers"):
        find_place(STEP | {"SLURM_STEP_TASKS_PER_NODE": "4"})


def test_ports_follow_from_the_job_and_stay_in_their_range() -> None:
    assert find_ports("20000-20002", 31002) == (20000, 20001, 20002)
    assert find_ports("20000-29999", 31002)[:3] == (21002, 21003, 21004)
    assert find_ports("20000-29999", 9_999)[:2] == (29999, 20000)


def test_a_launcher_of_each_node_meets_the_others_at_node_0(tmp_path: Path) -> None:
    found = begin(LaunchMode.TORCHRUN, phase(2, 2, JOB="2", OWN="x"), members(2, 1))
    assert found[1].argv == (
        *("python", "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", "1"),
        *("--master-addr", "10.0.0.1", "--master-port", "21000", "--max-restarts", "0"),
        *("--nproc-per-node", "2", "--log-dir", "/run/phase_1/logs/node1", "--redirects", "3"),
        *("train.py", "--a b"),
    )
    assert found[1].env == {"JOB": "2", "OWN": "x"}
    meeting = Meeting(tmp_path / "meeting")
    meeting.open()
    meeting.leave("turn-1", Turn(begins=found))
    assert meeting.read("turn-1", Turn) == Turn(begins=found)
    assert meeting.read("turn-1", Join) is None
    assert list(meeting.names()) == ["turn-1"]
    meeting.close()
    assert meeting.read("turn-1", Turn) is None
    assert list(meeting.names()) == []


def test_a_port_that_the_job_has_set_is_kept() -> None:
    tasks = members(2, 1, MASTER_PORT="29511", MASTER_ADDR="head")
    words = begin(LaunchMode.TORCHRUN, phase(2, 2), tasks)[0].argv
    assert words[words.index("--master-addr") :][:4] == (
        *("--master-addr", "head", "--master-port", "29511"),
    )
    ranks = begin(LaunchMode.SRUN_NATIVE, phase(2, 1), tasks)
    assert ranks[1].env["MASTER_PORT"] == "29511"
    with pytest.raises(LaunchError, match="MASTER_PORT: is 'x' in the job's environment"):
        begin(LaunchMode.TORCHRUN, phase(2, 2), members(2, 1, MASTER_PORT="x"))


def test_a_rank_that_sees_one_gpu_uses_that_one() -> None:
    """srun --gpus-per-task=1: device 3 of 1 does not exist."""
    tasks = {t: replace(m, devices=str(t)) for t, m in members(1, 4).items()}
    found = begin(LaunchMode.SRUN_NATIVE, phase(1, 4), tasks)
    assert [found[t].env["RANK"] for t in range(4)] == ["0", "1", "2", "3"]
    assert {found[t].env["LOCAL_RANK"] for t in range(4)} == {"0"}
    assert "CUDA_VISIBLE_DEVICES" not in found[3].env  # as Slurm gave it
    seen = {t: replace(m, devices="0,1,2,3") for t, m in members(1, 4).items()}
    found = begin(LaunchMode.SRUN_NATIVE, phase(1, 4), seen)
    assert [found[t].env["LOCAL_RANK"] for t in range(4)] == ["0", "1", "2", "3"]


def test_a_launcher_that_sees_too_few_gpus_is_refused() -> None:
    tasks = {t: replace(m, devices="0") for t, m in members(2, 1).items()}
    with pytest.raises(LaunchError) as caught:
        begin(LaunchMode.TORCHRUN, phase(2, 4), tasks)
    assert str(caught.value) == (
        "node0: shows 1 GPU (CUDA_VISIBLE_DEVICES=0) to a task with 4 ranks, expected 4; give "
        "--gpus-per-node=4 and no --gpus-per-task, or mode srun-native"
    )


def test_a_phase_with_fewer_ranks_leaves_the_other_tasks_alone() -> None:
    found = begin(LaunchMode.SRUN_NATIVE, phase(2, 1), members(2, 2))
    assert {task: b.env["RANK"] for task, b in found.items()} == {0: "0", 2: "1"}
    assert found[2].env["WORLD_SIZE"] == "2"
    assert [begin.is_copied for begin in found.values()] == [True, False]


@pytest.mark.parametrize(
    ("mode", "tasks", "problem"),
    [
        pytest.param(
            *(LaunchMode.TORCHRUN, members(3, 1)),
            "srun: started 3 tasks (1 on node0, 1 on node1, 1 on node2), expected 1 on each of 2 "
            "nodes in mode torchrun; give srun --nodes=2 --ntasks-per-node=1",
            id="nodes",
        ),
        pytest.param(
            *(LaunchMode.SRUN_NATIVE, members(2, 1)),
            "srun: started 2 tasks (1 on node0, 1 on node1), expected 2 on each of 2 nodes in mode "
            "srun-native; give srun --nodes=2 --ntasks-per-node=2",
            id="ranks",
        ),
    ],
)
def test_tasks_that_do_not_fit_the_workload_are_refused(
    mode: LaunchMode, tasks: dict[int, Join], problem: str
) -> None:
    with pytest.raises(LaunchError) as caught:
        begin(mode, phase(2, 2), tasks)
    assert str(caught.value) == problem


def test_a_script_of_a_recipe_is_not_run_several_times() -> None:
    plan = replace(phase(2, 1), start=None, is_script=True)
    with pytest.raises(LaunchError, match="is a recipe's script, and the step has 2 tasks"):
        begin(LaunchMode.TORCHRUN, plan, members(2, 1))


def test_the_table_of_ranks_is_read_as_that_of_torch() -> None:
    first = RankExit(rank=5, local_rank=1, host="b", returncode=-9, pid=77, time_s=0.0)
    other = replace(first, rank=0, local_rank=0, host="a", returncode=-15, pid=70)
    lines = [first_line(first), *format_table("train.py", [first, other])]
    around = "".join(f"[nodes]: {line}\n" for line in lines)
    found: list[ProcessExit] = []
    at = 0
    for line in around.splitlines(keepends=True):
        if any(literal in line for literal in LITERALS):
            found += read_exits(line.rstrip(), around, at)
        at += len(line)
    assert [(e.rank, e.how, e.is_first, e.pid) for e in found] == [
        (5, "SIGKILL", True, 77),
        (0, "SIGTERM", False, 70),
        (5, "SIGKILL", True, 77),
    ]


def test_a_job_without_one_of_its_nodes_is_refused() -> None:
    with pytest.raises(LaunchError, match="expected 1 on each of 2 nodes"):
        begin(LaunchMode.TORCHRUN, phase(2, 2), members(1, 1))

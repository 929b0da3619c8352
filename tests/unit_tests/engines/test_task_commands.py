from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_megatron.engines.config import LaunchMode
from pytest_megatron.engines.multitask.step import Meeting, Step, Turn
from pytest_megatron.engines.multitask.topology import TaskPlace, find_endpoint, find_place
from pytest_megatron.errors import LaunchError
from pytest_megatron.runs.layout import PhaseDirs
from pytest_megatron.workloads.recipe.case import Launcher
from pytest_megatron.workloads.training.plan.plan import PhasePlan, Ranks, started

STEP = {
    "SLURM_JOB_ID": "1000",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "rack1-gpu[07-08],login",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
}
ENDPOINT = ("10.0.0.1", 21000)


def place_of(task: int, num_nodes: int, per_node: int) -> TaskPlace:
    node, local = divmod(task, per_node)
    hosts = tuple(f"node{number}" for number in range(num_nodes))
    return TaskPlace(
        task=task, node=node, local=local, per_node=per_node, hosts=hosts, seed=0, name="1.0.0"
    )


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


def turn_of(mode: LaunchMode, plan: PhasePlan, *unset: str) -> Turn:
    return Turn(mode=mode, phase=plan, unset=unset, cwd=Path("/project"), endpoint=ENDPOINT)


def envs(turn: Turn, per_node: int, *jobs: Mapping[str, str]) -> list[dict[str, str]]:
    """The environment of each rank of one node, whose jobs have these variables."""
    return [turn.command(place_of(t, 1, per_node), job)[1] for t, job in enumerate(jobs)]


def test_a_task_finds_its_place_among_the_nodes() -> None:
    assert find_place(STEP) == TaskPlace(
        task=3,
        node=1,
        local=1,
        per_node=2,
        hosts=("rack1-gpu07", "rack1-gpu08", "login"),
        seed=31002,
        name="1000.2.0",
    )
    assert find_place({"SLURM_JOB_ID": "1", "SLURM_PROCID": "0"}) is None  # no step: a batch script


def test_nodes_have_the_same_number_of_tasks() -> None:
    with pytest.raises(LaunchError, match=r"is '2\(x2\),1', expected as many tasks on each node"):
        find_place(STEP | {"SLURM_STEP_TASKS_PER_NODE": "2(x2),1"})


def test_ports_follow_from_the_job_and_stay_in_their_range() -> None:
    place = place_of(0, 1, 1)
    host, port = find_endpoint(replace(place, seed=31002), "20000-29999")
    assert (host, 21002 <= port < 21018) == ("127.0.0.1", True)
    assert find_endpoint(replace(place, seed=5), "29437-29437") == ("127.0.0.1", 29437)


def test_a_launcher_of_each_node_meets_the_others_at_node_0(tmp_path: Path) -> None:
    turn = turn_of(LaunchMode.TORCHRUN, phase(2, 2, JOB="2", OWN="x"), "GONE")
    argv, env = turn.command(place_of(1, 2, 1), {"JOB": "1", "KEPT": "k", "GONE": "g"})
    assert tuple(argv) == (
        *("python", "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", "1"),
        *("--master-addr", "10.0.0.1", "--master-port", "21000", "--max-restarts", "0"),
        *("--nproc-per-node", "2", "--log-dir", "/run/phase_1/logs/node1", "--redirects", "3"),
        *("train.py", "--a b"),
    )
    assert env == {"JOB": "2", "OWN": "x", "KEPT": "k"}
    meeting = Meeting(tmp_path / "meeting")
    assert meeting.names() == set()
    meeting.open()
    meeting.leave("turn-1", turn)
    assert meeting.read("turn-1", Turn) == turn
    assert meeting.names() == {"turn-1"}
    meeting.close()
    assert meeting.read("turn-1", Turn) is None
    assert meeting.names() == {"over"}


def test_a_rank_that_sees_one_gpu_uses_that_one() -> None:
    """srun --gpus-per-task=1: device 3 of 1 does not exist."""
    turn = turn_of(LaunchMode.SRUN_NATIVE, phase(1, 4))
    found = envs(turn, 4, *({"CUDA_VISIBLE_DEVICES": str(task)} for task in range(4)))
    assert [env["RANK"] for env in found] == ["0", "1", "2", "3"]
    assert {env["LOCAL_RANK"] for env in found} == {"0"}
    assert found[3]["CUDA_VISIBLE_DEVICES"] == "3"  # as Slurm gave it
    found = envs(turn, 4, *[{"CUDA_VISIBLE_DEVICES": "0,1,2,3"}] * 4)
    assert [env["LOCAL_RANK"] for env in found] == ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    ("mode", "place", "problem"),
    [
        pytest.param(
            *(LaunchMode.TORCHRUN, place_of(0, 3, 1)),
            "srun: started 1 task on each of node0, node1, node2, expected 1 on each of 2 nodes in "
            "mode torchrun; give srun --nodes=2 --ntasks-per-node=1",
            id="nodes",
        ),
        pytest.param(
            *(LaunchMode.SRUN_NATIVE, place_of(0, 2, 1)),
            "srun: started 1 task on each of node0, node1, expected 2 on each of 2 nodes in mode "
            "srun-native; give srun --nodes=2 --ntasks-per-node=2",
            id="ranks",
        ),
    ],
)
def test_tasks_that_do_not_fit_the_workload_are_refused(
    tmp_path: Path, mode: LaunchMode, place: TaskPlace, problem: str
) -> None:
    with pytest.raises(LaunchError) as caught:
        step_of(tmp_path, mode, place).start({}, phase(2, 2), tmp_path)
    assert str(caught.value) == problem


def test_a_script_of_a_recipe_is_not_run_several_times(tmp_path: Path) -> None:
    plan = replace(phase(2, 1), start=None, is_script=True)
    step = step_of(tmp_path, LaunchMode.TORCHRUN, place_of(0, 2, 1))
    with pytest.raises(LaunchError, match="is a recipe's script, and the step has 2 tasks"):
        step.start({}, plan, tmp_path)


def step_of(root: Path, mode: LaunchMode, place: TaskPlace) -> Step:
    return Step(place=place, mode=mode, ports="20000-29999", meeting=Meeting(root / "meeting"))

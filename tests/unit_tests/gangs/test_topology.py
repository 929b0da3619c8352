from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from pytest_megatron.errors import LaunchError
from pytest_megatron.gangs.rank.bootstrap import rank_env
from pytest_megatron.gangs.topology import (
    Nodes,
    RankPlace,
    count_gpus,
    find_key,
    share_gpus,
)
from pytest_megatron.session.slurm_step import (
    SlurmStep,
    find_slurm_step,
    first_host,
)

TWO = Nodes(num_nodes=2, ranks_per_node=4)


@pytest.mark.parametrize(
    ("world_size", "by_node"),
    [
        pytest.param(8, [4, 4], id="all"),
        pytest.param(4, [4], id="one-node"),
        pytest.param(1, [1], id="one-rank"),
        pytest.param(6, [4, 2], id="in-order"),
        pytest.param(12, [6, 6], id="more-than-there-is-room-for"),
    ],
)
def test_nodes_are_filled_in_order(world_size: int, by_node: list[int]) -> None:
    places = TWO.place(world_size)
    assert [place.rank for place in places] == list(range(world_size))
    assert [TWO.num_ranks_on(n, world_size) for n in range(len(by_node))] == by_node
    assert [(p.node_rank, p.local_rank) for p in places] == [
        (node, local) for node, size in enumerate(by_node) for local in range(size)
    ]
    assert {(p.local_world_size, p.num_nodes) for p in places if p.node_rank == 0} == {
        (by_node[0], len(by_node))
    }


def test_a_rank_on_another_node_has_the_variables_of_torch() -> None:
    env = rank_env(TWO.place(6)[5], 6)
    names = (
        "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK "
        "ROLE_WORLD_SIZE"
    )
    assert [env[name] for name in names.split()] == ["5", "1", "6", "2", "1", "2", "5", "6"]


@pytest.mark.parametrize(
    ("world_size", "ranks_per_gpu", "by_node"),
    [
        pytest.param(8, 4, [2, 2, 2, 2], id="all-full"),
        pytest.param(8, 8, [1] * 8, id="one-gpu"),
        pytest.param(2, 4, [1, 1], id="fewer-ranks-than-may-share"),
        pytest.param(3, 2, [2, 1], id="uneven"),
        pytest.param(4, 1, [4], id="none-shares"),
    ],
)
def test_ranks_that_share_gpus_are_dealt_out_as_to_nodes_that_have_them(
    world_size: int, ranks_per_gpu: int, by_node: list[int]
) -> None:
    assert count_gpus(world_size, ranks_per_gpu) == by_node[0]
    assert share_gpus(world_size, ranks_per_gpu) == tuple(
        RankPlace(
            rank=sum(by_node[:node]) + local,
            node_rank=node,
            local_rank=local,
            local_world_size=size,
            num_nodes=len(by_node),
        )
        for node, size in enumerate(by_node)
        for local in range(size)
    )


def test_gangs_of_node_0_run_side_by_side_and_one_that_spans_nodes_alone() -> None:
    assert [TWO.num_free(sizes) for sizes in ([], [1], [2, 2], [8], [6])] == [8, 3, 0, 0, 0]


def test_nodes_that_come_at_once_agree_on_one_private_key(tmp_path: Path) -> None:
    keys: list[bytes] = []
    barrier = threading.Barrier(8)

    def come() -> None:
        barrier.wait()
        keys.append(find_key({}, tmp_path))

    threads = [threading.Thread(target=come) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (len(keys), len(set(keys)), len(keys[0])) == (8, 1, 32)
    (made,) = (tmp_path / ".pytest_megatron").iterdir()
    assert (made.name, made.stat().st_mode & 0o777) == ("key", 0o600)
    assert find_key({}, tmp_path) == keys[0]


def test_every_step_of_slurm_has_a_key_of_its_own(tmp_path: Path) -> None:
    keys = {find_key({}, tmp_path, step) for step in ("", "lab:7.0:0", "lab:7.1:0")}
    assert len(keys) == 3
    assert find_key({}, tmp_path, "lab:7.0:0") in keys


def test_the_key_in_the_environment_wins_and_touches_no_file(tmp_path: Path) -> None:
    env = {"PYTEST_MEGATRON_KEY": "our secret"}
    assert find_key(env, tmp_path) != find_key({"PYTEST_MEGATRON_KEY": "another"}, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    find_key({}, tmp_path)
    path = tmp_path / ".pytest_megatron" / "key"
    path.chmod(0o644)
    with pytest.raises(LaunchError, match="others can read it; chmod 600 it, or set PYTEST_MEG"):
        find_key({}, tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_home_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(LaunchError, match="Permission denied; set PYTEST_MEGATRON_KEY on every"):
        find_key({}, tmp_path)


STEP = {
    "SLURM_CLUSTER_NAME": "main",
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "5",
    "SLURM_NODEID": "1",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("login", "login"),
        ("node1,node2", "node1"),
        ("node[001-004,9],login", "node001"),
        ("rack[1-2]node[04-07]-ib,x", "rack1node04-ib"),
    ],
)
def test_the_first_host_of_slurms_list_is_found(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


def test_nodes_are_those_of_the_step_of_slurm() -> None:
    port = 20_000 + (1234 * 31 + 5) % 12_000
    assert find_slurm_step(STEP) == SlurmStep(
        num_nodes=2, node_rank=1, name="main:1234.5:0", host="gpu07", port=port
    )
    assert find_slurm_step({**STEP, "SLURM_RESTART_COUNT": "1"}) != find_slurm_step(STEP)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"SLURM_STEP_ID": ""}, id="no-step"),
        pytest.param({"SLURM_STEP_NUM_NODES": "1"}, id="one-node"),
        pytest.param({"SLURM_STEP_NODELIST": ""}, id="no-hosts"),
        pytest.param({"SLURM_NODEID": ""}, id="no-node-id"),
    ],
)
def test_without_a_step_on_several_nodes_slurm_says_nothing(change: dict[str, str]) -> None:
    assert find_slurm_step({**STEP, **change}) is None
    assert find_slurm_step({}) is None


def test_a_step_with_several_tasks_on_a_node_is_refused() -> None:
    with pytest.raises(LaunchError, match="started 16 tasks on 2 nodes, expected one on each"):
        find_slurm_step({**STEP, "SLURM_STEP_NUM_TASKS": "16"})

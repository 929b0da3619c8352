from __future__ import annotations

import pytest

from pytest_megatron.errors import LaunchError
from pytest_megatron.gang.topology import (
    SlurmStep,
    choose_ports,
    count_unused_nodes,
    find_slurm_step,
    first_host,
)

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


def test_node_0_has_other_ports_where_somebody_has_its_first() -> None:
    assert choose_ports(20_001) == (20_001, 23_002, 26_003, 29_004)
    assert choose_ports(31_999) == (31_999, 23_000, 26_001, 29_002)


@pytest.mark.parametrize(
    ("env", "num_nodes"),
    [
        pytest.param({}, 0, id="no-slurm"),
        pytest.param({"SLURM_JOB_NUM_NODES": "1"}, 0, id="one-node"),
        pytest.param({"SLURM_JOB_NUM_NODES": "3"}, 3, id="shell-of-salloc"),
        pytest.param(
            {"SLURM_JOB_NUM_NODES": "3", "SLURM_STEP_ID": "4294967290"}, 3, id="interactive-step"
        ),
        pytest.param({"SLURM_JOB_NUM_NODES": "3", "SLURM_STEP_ID": "0"}, 0, id="step"),
    ],
)
def test_nodes_of_an_allocation_that_nobody_uses_are_counted(
    env: dict[str, str], num_nodes: int
) -> None:
    assert count_unused_nodes(env) == num_nodes


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

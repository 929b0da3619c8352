"""Variables of the environment: what NCCL and gloo take is no finding, the rest is."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_megatron.doctor.checks.machine import check_variables
from pytest_megatron.doctor.command import finding_of
from pytest_megatron.doctor.facts import Devices, EnvironmentFacts, MachineFacts, Python, Torch
from pytest_megatron.gpu.host import Gpu

PYTHON = Python(
    executable=Path("python"),
    version="3.12.3",
    tag="cp312",
    machine="x86_64",
    prefix=Path(),
    paths=(),
)
MACHINE = MachineFacts(
    interfaces=("bond0", "eth0", "ib0"),
    links=("bond0", "docker0", "eth0", "ib0", "lo"),
    infiniband={"mlx5_0/1": "ACTIVE", "mlx5_1/1": "ACTIVE"},
)


def found(variable: str, value: str, *, gpu: str | None = None) -> str:
    """Return the rules that find something wrong with a variable, and what they say."""
    gpus = (Gpu(index=0, name=gpu, uuid="", memory_bytes=0),) if gpu else ()
    facts = EnvironmentFacts(
        python=PYTHON,
        machine=MACHINE,
        torch=Torch(version="2.9.0", cuda="12.8"),
        devices=Devices(gpus=gpus),
    )
    hits = [finding_of(hit) for hit in check_variables(facts, {variable: value})]
    return "".join(f"{hit.rule.id}: {hit.found}" for hit in hits)


# Values of NCCL's documentation, of Megatron-LM's scripts and of public launch scripts.
@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("NCCL_P2P_DISABLE", "0"),
        ("NCCL_P2P_LEVEL", "NVL"),
        ("NCCL_SHM_DISABLE", "0"),
        ("NCCL_SOCKET_IFNAME", "eth"),
        ("NCCL_SOCKET_IFNAME", "=eth0,eth1"),
        ("NCCL_SOCKET_IFNAME", "^docker0,lo"),
        ("NCCL_SOCKET_IFNAME", "^=docker0"),
        ("NCCL_SOCKET_IFNAME", "^lo,docker,veth,eni"),
        ("NCCL_SOCKET_IFNAME", "lo"),
        ("NCCL_SOCKET_IFNAME", "ens,eth,ib"),
        ("GLOO_SOCKET_IFNAME", "eth0"),
        ("GLOO_SOCKET_IFNAME", "lo"),
        ("GLOO_SOCKET_IFNAME", "ib0,bond0"),
        ("GLOO_SOCKET_IFNAME", "docker0"),
        ("NCCL_IB_HCA", "mlx5"),
        ("NCCL_IB_HCA", "=mlx5_0:1,mlx5_1:1"),
        ("NCCL_IB_HCA", "^mlx5_1"),
        ("CUDA_LAUNCH_BLOCKING", "0"),
    ],
)
def test_a_value_that_is_understood_is_no_finding(variable: str, value: str) -> None:
    assert found(variable, value) == ""


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("NCCL_SOCKET_IFNAME", "=eth", "interface-unknown: NCCL_SOCKET_IFNAME is =eth, and"),
        ("NCCL_SOCKET_IFNAME", "^bond,eth,ib,lo", "interface-unknown: "),
        ("GLOO_SOCKET_IFNAME", "bond1", "interface-unknown: GLOO_SOCKET_IFNAME is bond1"),
        ("GLOO_SOCKET_IFNAME", "eth", "interface-unknown: GLOO_SOCKET_IFNAME is eth, and"),
        ("GLOO_SOCKET_IFNAME", "10.0.0.4", "interface-unknown: GLOO_SOCKET_IFNAME is 10.0.0.4"),
        ("NCCL_IB_HCA", "^mlx5", "adapter-unknown: NCCL_IB_HCA is ^mlx5"),
        ("NCCL_P2P_LEVEL", "LOC", "slow-variable: NCCL_P2P_LEVEL is LOC"),
        ("LOCAL_RANK", "0", "ranks-preset: preset in this environment: LOCAL_RANK=0"),
    ],
)
def test_a_value_that_is_not_understood_is_quoted(variable: str, value: str, said: str) -> None:
    assert said in found(variable, value)


def test_gpus_without_peer_copies_may_be_told_so() -> None:
    assert found("NCCL_P2P_DISABLE", "1", gpu="NVIDIA GeForce RTX 4090") == ""
    assert "slow-variable" in found("NCCL_P2P_DISABLE", "1", gpu="NVIDIA H200")

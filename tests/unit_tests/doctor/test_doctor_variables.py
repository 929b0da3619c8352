"""Variables of the environment: what NCCL, gloo and OpenMP take is no finding, the rest is."""

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
    soabi="",
    machine="x86_64",
    prefix=Path(),
    is_venv=True,
    paths=(),
    encoding="utf-8",
)
MACHINE = MachineFacts(
    interfaces=("bond0", "eth0", "ib0"),
    links=("bond0", "docker0", "eth0", "ib0", "lo"),
    infiniband={"mlx5_0/1": "ACTIVE", "mlx5_1/1": "ACTIVE"},
)


def found(variable: str, value: str, *, nccl: str | None = None, gpu: str | None = None) -> str:
    """Return the rules that find something wrong with a variable, and what they say."""
    gpus = (Gpu(index=0, name=gpu, uuid="", memory_bytes=0),) if gpu else ()
    facts = EnvironmentFacts(
        python=PYTHON,
        machine=MACHINE,
        torch=Torch(version="2.9.0", cuda="12.8", nccl=nccl),
        devices=Devices(gpus=gpus),
    )
    hits = [finding_of(hit) for hit in check_variables(facts, {variable: value})]
    return "".join(f"{hit.rule.id}: {hit.found}" for hit in hits)


# Values of NCCL's documentation, of Megatron-LM's scripts and of public launch scripts.
@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("NCCL_ALGO", "Ring"),
        ("NCCL_ALGO", "RING"),
        ("NCCL_ALGO", "^NVLS,NVLSTree"),
        ("NCCL_ALGO", "Tree,Ring,CollnetDirect,CollnetChain"),
        ("NCCL_ALGO", "ring,collnetdirect;allreduce:tree,collnetdirect;broadcast:ring"),
        ("NCCL_ALGO", "allreduce:^tree"),
        ("NCCL_ALGO", "AllGather:PAT;reducescatter:PAT"),
        ("NCCL_ALGO", ""),
        ("NCCL_PROTO", "simple"),
        ("NCCL_PROTO", "^LL128"),
        ("NCCL_PROTO", "LL,Simple;allreduce:^LL"),
        ("NCCL_PROTO", "^LL128;allreduce:LL128"),
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
        ("OMP_NUM_THREADS", "1"),
        ("OMP_NUM_THREADS", "4,2"),
        ("OMP_NUM_THREADS", " 16 "),
        ("MASTER_PORT", "29500"),
        ("CUDA_LAUNCH_BLOCKING", "0"),
    ],
)
def test_a_value_that_is_understood_is_no_finding(variable: str, value: str) -> None:
    assert found(variable, value) == ""


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("NCCL_ALGO", "Tree, Ring", "nccl-choice: NCCL_ALGO is 'Tree, Ring': ' Ring' is none"),
        ("NCCL_ALGO", "all_reduce:ring", "'all_reduce' is no function"),
        ("NCCL_ALGO", "allreduce:tree;ring", "'ring' lacks a function"),
        ("NCCL_PROTO", "LL64", "'LL64' is none of its names"),
        ("NCCL_SOCKET_IFNAME", "=eth", "interface-unknown: NCCL_SOCKET_IFNAME is =eth, and"),
        ("NCCL_SOCKET_IFNAME", "^bond,eth,ib,lo", "interface-unknown: "),
        ("GLOO_SOCKET_IFNAME", "bond1", "interface-unknown: GLOO_SOCKET_IFNAME is bond1"),
        ("GLOO_SOCKET_IFNAME", "eth", "interface-unknown: GLOO_SOCKET_IFNAME is eth, and"),
        ("GLOO_SOCKET_IFNAME", "10.0.0.4", "interface-unknown: GLOO_SOCKET_IFNAME is 10.0.0.4"),
        ("NCCL_IB_HCA", "^mlx5", "adapter-unknown: NCCL_IB_HCA is ^mlx5"),
        ("NCCL_P2P_LEVEL", "LOC", "slow-variable: NCCL_P2P_LEVEL is LOC"),
        ("OMP_NUM_THREADS", "all", "omp-threads: OMP_NUM_THREADS is 'all'"),
        ("OMP_NUM_THREADS", "4x", "omp-threads: "),
        ("MASTER_PORT", "99999", "port-not-a-number: MASTER_PORT is '99999'"),
        ("LOCAL_RANK", "0", "ranks-preset: preset in this environment: LOCAL_RANK=0"),
    ],
)
def test_a_value_that_is_not_understood_is_quoted(variable: str, value: str, said: str) -> None:
    assert said in found(variable, value)


def test_lists_of_nccl_are_read_as_its_version_reads_them() -> None:
    assert found("NCCL_ALGO", "allreduce:ring", nccl="2.27.3") == ""
    assert "NCCL 2.21.5 has no lists" in found("NCCL_ALGO", "allreduce:ring", nccl="2.21.5")
    assert found("NCCL_ALGO", "Collnet", nccl="2.10.3") == ""
    assert "'Collnet' is none" in found("NCCL_ALGO", "Collnet", nccl="2.27.3")


def test_gpus_without_peer_copies_may_be_told_so() -> None:
    assert found("NCCL_P2P_DISABLE", "1", gpu="NVIDIA GeForce RTX 4090") == ""
    assert "slow-variable" in found("NCCL_P2P_DISABLE", "1", gpu="NVIDIA H200")

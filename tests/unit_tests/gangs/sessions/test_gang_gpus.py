"""Which GPUs the ranks of a gang see, on pretended ones: nothing here uses a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from gang_suite import Suite
from ports import held_port
from pretended_gpus import pretend_gpus

SEEN = "RANK LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE CUDA_VISIBLE_DEVICES"
SUITE = f"""
    import os
    import pytest

    def write(rank, *names):
        with open(f"seen{{rank}}", "w") as seen:
            print(*(os.environ.get(name, "none") for name in names), sep="\\n", file=seen)

    def test_sees_its_gpus(rank):
        write(rank, *"{SEEN}".split(), "NCCL_HOSTID")

    @pytest.mark.world_size(2)
    def test_fits_on_one_gpu(rank):
        write(f"_of_two_{{rank}}", "CUDA_VISIBLE_DEVICES", "LOCAL_WORLD_SIZE")

    @pytest.mark.world_size(8)
    def test_needs_more_than_there_are(rank):
        pass
"""


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    return Suite(tmp_path).write(test_suite=SUITE)


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """A host with two pretended GPUs."""
    return {**pretend_gpus(tmp_path, 2), "PYTEST_MEGATRON_KEY": "k"}


def test_ranks_that_share_gpus_are_as_on_several_nodes(suite: Suite, env: dict[str, str]) -> None:
    run = suite.run("-v", "-rs", "--gpus", "4", "--ranks-per-gpu", "2", env=env)
    assert run.words == {
        "test_sees_its_gpus": "PASSED",
        "test_fits_on_one_gpu": "PASSED",
        "test_needs_more_than_there_are": "SKIPPED",
    }
    assert "needs 4 GPUs, this host has 2" in run.stdout
    seen = [suite.read(f"seen{rank}") for rank in range(4)]
    assert [words[:-1] for words in seen] == [
        ["0", "0", "2", "0", "2", "GPU-0,GPU-1"],
        ["1", "1", "2", "0", "2", "GPU-0,GPU-1"],
        ["2", "0", "2", "1", "2", "GPU-0,GPU-1"],
        ["3", "1", "2", "1", "2", "GPU-0,GPU-1"],
    ]
    first, second, third, fourth = (words[-1] for words in seen)
    assert first == second != third == fourth
    assert [suite.read(f"seen_of_two_{rank}")[1] for rank in range(2)] == ["1", "1"]
    assert suite.read("seen_of_two_0") == suite.read("seen_of_two_1") != ["GPU-0,GPU-1", "1"]


def test_ranks_with_a_gpu_each_keep_the_name_that_nccl_has_for_the_host(
    suite: Suite, env: dict[str, str]
) -> None:
    run = suite.run("--gpus", "2", "-k", "sees", env=env)
    assert run.returncode == 0, run.stdout
    assert [suite.read(f"seen{rank}")[1:] for rank in range(2)] == [
        [str(rank), "2", "0", "1", "GPU-0,GPU-1", "none"] for rank in range(2)
    ]


def test_who_asks_for_more_gpus_than_there_are_is_told(suite: Suite, env: dict[str, str]) -> None:
    assert [
        suite.run(*arguments, env=env).stderr.partition(";")[0]
        for arguments in (["--gpus", "5"], ["--ranks", "3", "--device", "cuda"])
    ] == [
        "ERROR: --gpus: needs 5 GPUs, this host has 2",
        "ERROR: --device: needs 3 GPUs, this host has 2",
    ]


@pytest.mark.nightly
def test_each_node_leases_gpus_of_its_own(suite: Suite, env: dict[str, str]) -> None:
    with held_port() as port:
        endpoint = f"127.0.0.1:{port}"
        given = ("--gpus", "1", "--nnodes", "2", "--rdzv-endpoint", endpoint, "-k", "sees")
        other = suite.start(*given, "--node-rank", "1", **env)
        run = suite.run(*given, "--node-rank", "0", env=env, command=suite.command())
        output, _ = other.communicate()
    assert (run.returncode, other.returncode) == (0, 0), run.stdout + output
    assert {suite.read(f"seen{rank}")[5] for rank in range(2)} == {"GPU-0", "GPU-1"}

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pytest_megatron.errors import CaseError
from pytest_megatron.workloads.recipe.case import Launcher, WorkloadCase, read_case
from pytest_megatron.workloads.training.plan.plan import (
    NODE_AGENTS,
    Ranks,
    start_words,
    started,
    starter_of,
)
from pytest_megatron.workloads.training.run.node_agents import node_command

RANKS = Ranks(
    starter=Launcher.TORCHRUN, num_nodes=1, per_node=2, tee_ranks=(0, 3), logs=Path("/run/logs")
)


@pytest.fixture
def ft_case(tmp_path: Path) -> WorkloadCase:
    (tmp_path / "model_config.yaml").write_text("TEST_TYPE: regular\nLAUNCHER: ft_launcher\n")
    return read_case(tmp_path / "model_config.yaml")


def test_no_launcher_starts_a_rank_again() -> None:
    """In Megatron-LM restarts of ft_launcher hide crashes."""
    for starter in (Launcher.TORCHRUN, Launcher.FT_LAUNCHER):
        ranks = replace(RANKS, starter=starter)
        words = start_words(started("python", ranks, "train.py", ["--a", "1"]))
        at = words.index("--max-restarts")
        assert words[at + 1] == "0"
    assert words == (
        *("python", "-m", "nvidia_resiliency_ext.fault_tolerance.launcher", "--standalone"),
        *("--local-addr", "127.0.0.1", "--max-restarts", "0", "--nproc-per-node", "2"),
        *("--log-dir", "/run/logs"),
        *("--redirects", "3", "--tee", "0:3", "train.py", "--a", "1"),
    )


def test_without_a_launcher_the_program_is_started_alone(tmp_path: Path) -> None:
    (tmp_path / "model_config.yaml").write_text("TEST_TYPE: regular\nLAUNCHER: none\n")
    case = read_case(tmp_path / "model_config.yaml")
    starter = starter_of(case, "torchrun", has_ft_launcher=False)
    start = started("python", replace(RANKS, starter=starter), "-m pkg.train", ["--a"])
    assert start_words(start)[-7:] == ("/run/logs", "1", "python", "-u", "-m", "pkg.train", "--a")
    assert start.script is None


def test_a_launcher_that_is_not_installed_is_named_with_the_way_out(ft_case: WorkloadCase) -> None:
    with pytest.raises(CaseError) as caught:
        starter_of(ft_case, None, has_ft_launcher=False)
    assert str(caught.value) == (
        f"{ft_case.path}: LAUNCHER is 'ft_launcher' and nvidia_resiliency_ext is not installed, "
        "nothing was run; `pip install nvidia-resiliency-ext`, or set "
        "PYTEST_MEGATRON_LAUNCHER=torchrun to start the same ranks with torch.distributed.run"
    )


def test_the_variable_wins_over_the_case(ft_case: WorkloadCase) -> None:
    assert starter_of(ft_case, None, has_ft_launcher=True) is Launcher.FT_LAUNCHER
    assert starter_of(ft_case, "torchrun", has_ft_launcher=False) is Launcher.TORCHRUN
    with pytest.raises(CaseError, match="is 'slurm', expected one of ft_launcher, torchrun"):
        starter_of(ft_case, "slurm", has_ft_launcher=True)


def test_a_command_that_is_no_python_file_is_started_as_it_is() -> None:
    start = started("python", RANKS, "nemo llm pretrain", ["a.b=c"])
    assert start_words(start)[-5:] == ("--no-python", "nemo", "llm", "pretrain", "a.b=c")
    assert start.rank_words == ("nemo", "llm", "pretrain", "a.b=c")


def test_a_rank_alone_runs_what_the_launcher_would_run() -> None:
    start = started("python", RANKS, "train.py", ["--a"])
    assert start.rank_words == ("python", "-u", "train.py", "--a")


def test_every_node_has_an_agent_that_knows_its_rank_and_where_to_meet() -> None:
    words = start_words(started("python", replace(RANKS, num_nodes=2), "train.py", []))
    assert words[:6] == ("python", "-I", str(NODE_AGENTS), "2", "2", "0,3")
    assert node_command(words[6:], 1, 2, "0,3", ("127.0.0.1", 1234)) == [
        *("python", "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", "1"),
        *("--master-addr", "127.0.0.1", "--master-port", "1234", "--tee", "1:3"),
        *("--max-restarts", "0", "--nproc-per-node", "2", "--log-dir", "/run/logs/node1"),
        *("--redirects", "3", "train.py"),
    ]

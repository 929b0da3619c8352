"""Workloads of several nodes on one machine, other launchers, other programs: real processes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from tiny_project import Project, Run, loss_of

pytestmark = pytest.mark.nightly

HAS_FT_LAUNCHER = importlib.util.find_spec("nvidia_resiliency_ext") is not None
FT = {"LAUNCHER": "ft_launcher"}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    project = Project(root=tmp_path_factory.mktemp("nodes"), gpus=1, has_torch=True)
    for case, fault in (("sound", None), ("kill", "kill@4:1")):
        project.row(project.case(case, fault=fault), nodes=[2])
    project.add("ft", config=FT)
    project.add("ft_crash", "crash@3", config=FT)
    return project


@pytest.fixture(scope="module")
def run(project: Project) -> Run:
    return project.run("recipes", "--tee-ranks", "all")


def test_the_ranks_of_all_nodes_train_together_and_log_by_their_rank(run: Run) -> None:
    """In Megatron-LM a recipe with `nodes: 2` runs on one node."""
    assert run.verdict("sound") == ("PASSED", "passed")
    phase = run.item_dir("sound") / "repeat_1" / "attempt_1" / "phase_1"
    assert sorted(path.name for path in (phase / "logs").iterdir()) == ["0", "1"]
    assert "iteration       10/" in (phase / "logs" / "1" / "stdout.log").read_text()
    assert loss_of(phase / "metrics.json").steps[-1] == 10


@pytest.mark.everyday
def test_a_failure_on_another_node_than_the_first_fails_the_workload(run: Run) -> None:
    """In Megatron-LM nodes but the first end with 0, also if their training failed."""
    assert run.verdict("kill") == ("FAILED", "failed")
    assert "rank 1 of 2 was killed by SIGKILL, after iteration" in run.problem("kill")


@pytest.mark.skipif(HAS_FT_LAUNCHER, reason="nvidia-resiliency-ext is installed")
def test_a_missing_launcher_is_one_clear_error_and_can_be_replaced(
    project: Project, run: Run
) -> None:
    assert run.verdict("ft") == ("ERROR", "broken")
    assert "nvidia_resiliency_ext is not installed, nothing was run" in run.problem("ft")
    stand_in = Project(root=project.root, gpus=1)
    again = stand_in.run(
        "recipes", "-k", "ft", run_dir="replaced", PYTEST_MEGATRON_LAUNCHER="torchrun"
    )
    assert again.verdict("ft") == ("PASSED", "passed")
    assert again.verdict("ft_crash") == ("FAILED", "failed")


@pytest.mark.skipif(not HAS_FT_LAUNCHER, reason="needs nvidia-resiliency-ext")
def test_ft_launcher_starts_the_ranks_and_does_not_hide_a_crash(run: Run) -> None:
    """In Megatron-LM restarts of ft_launcher hide crashes."""
    assert run.verdict("ft") == ("PASSED", "passed")
    assert run.verdict("ft_crash") == ("FAILED", "failed")
    assert "raised ValueError: the crash of rank 0" in run.problem("ft_crash")


def test_a_row_names_its_nodes_in_its_plan(project: Project) -> None:
    text = project.run("recipes", "-k", "sound", "--plan").stdout
    assert "ranks: 2 on cpu" in text
    assert f"{Path('run') / 'node_agents.py'} 2 1 0,3" in text

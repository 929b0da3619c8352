"""CI from the plan to the verdict, by the lines of the files that `ci init` writes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from ci_project import make_project
from gitlab import Pipelines
from run_simulation import Scenario, simulate

from pytest_megatron.ci.workflow import GITLAB_FILE

pytestmark = pytest.mark.nightly


@pytest.fixture(autouse=True)
def _scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    scripts = Path(sys.executable).parent
    monkeypatch.setenv("PATH", f"{scripts}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.everyday
def test_one_job_fails_one_is_killed_one_is_lost(tmp_path: Path) -> None:
    """If anything happens to jobs, the verdict fails and names them."""
    scenario = Scenario(
        fails=True,
        waits=True,
        trains=False,
        lost="test_last",
        killed="more",
    )
    simulation, results = simulate(scenario, tmp_path)
    assert results == {
        "plan": "success",
        "unit": "failure",
        "integration": "skipped",
        "verdict": "failure",
    }
    told = simulation.summary.split("### Flaky")[0]
    assert "## :x: failed: 1 of 2 items, 2 of 3 jobs have a problem" in told
    assert "test_last.py-dev-cpu-latest-583450` is in the plan and left nothing" in told
    assert "more-.py-dev-cpu-latest-ae8d37` left no run.json: it was killed early" in told
    assert "- started on rank 1, `tests/unit_tests/test_one.py:4`" in told
    assert "artifacts/logs-tests-unit_tests-----.py-4711-" in told
    assert set(simulation.runners.values()) == {'["ubuntu-24.04"]', "ubuntu-24.04"}


def test_a_sound_project_is_green_on_github(tmp_path: Path) -> None:
    simulation, results = simulate(Scenario(), tmp_path)
    assert set(results.values()) == {"success"}, simulation.steps
    assert "passed: 4 items in 4 jobs" in simulation.summary


def test_a_sound_project_is_green_on_gitlab(tmp_path: Path) -> None:
    make_project(tmp_path / "origin", trains=False)
    pipelines = Pipelines(origin=tmp_path / "origin", root=tmp_path)
    results = pipelines.run(GITLAB_FILE)
    assert (set(results.values()), len(results)) == ({True}, 6), pipelines.outputs
    assert "passed: 3 items in 3 jobs" in pipelines.outputs["verdict"]

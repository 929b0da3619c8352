"""Runs the CI of a small project on this machine, from the plan to the verdict.

The project has the workflow that `ci init` writes; its jobs are processes on clean clones, and what
they leave are zips.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from ci_project import MARK, make_project, run
from runner import Simulation

from pytest_megatron.base.files import JsonValue
from pytest_megatron.ci.workflow import GITHUB_FILE


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What happens to a run of CI.

    Attributes:
        fails, waits, trains: As `make_project` takes them.
        lost: Words of the ids of jobs whose runner goes away.
        killed: Words of the ids of jobs that are killed in a test.
    """

    fails: bool = False
    waits: bool = False
    trains: bool = True
    lost: str | None = None
    killed: str | None = None


def simulate(scenario: Scenario, root: Path) -> tuple[Simulation, dict[str, str]]:
    """Run one scenario; return it, and the result of each job of the workflow."""
    origin = root / "origin"
    make_project(
        origin,
        fails=scenario.fails,
        waits=scenario.waits,
        trains=scenario.trains,
    )
    ids = job_ids(origin)
    repository: JsonValue = {"full_name": "tiny/tiny"}
    simulation = Simulation(
        origin=origin,
        root=root,
        file=GITHUB_FILE,
        github={
            "event_name": "pull_request",
            "ref": "refs/pull/7/merge",
            "run_id": "4711",
            "run_attempt": "1",
            "repository": "tiny/tiny",
            "sha": run("git", "rev-parse", "HEAD", cwd=origin).strip(),
            "event": {"pull_request": {"labels": [], "head": {"repo": repository}}},
        },
        lost=frozenset(name for name in ids if scenario.lost and scenario.lost in name),
        killed={name: MARK for name in ids if scenario.killed and scenario.killed in name},
    )
    return simulation, simulation.run()


def job_ids(origin: Path) -> list[str]:
    """Return the ids of the jobs that the plan has for a pull request without labels."""
    text = run("pytest-megatron", "plan", "--format", "json", cwd=origin)
    return [job["id"] for job in json.loads(text)["jobs"]]

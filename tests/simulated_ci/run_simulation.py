"""Runs the CI of a small project on this machine, from the plan to the verdict.

    python tests/simulated_ci/run_simulation.py [SCENARIO...] [--keep DIR]

Every scenario is a project of its own with the workflow that `ci init` writes; its jobs are
processes on clean clones, and what they leave are zips. Exits with 1 if a verdict is not the
expected one.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from ci_project import MARK, WORKLOAD, make_project, run
from gitlab import Pipelines
from runner import Simulation

from pytest_megatron.base.files import JsonValue
from pytest_megatron.ci.workflow import GITHUB_FILE, GITLAB_FILE


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What happens to a run of CI, and what its summary must say.

    Attributes:
        fails, waits, differs, trains: As `make_project` takes them.
        is_of_fork: Whether its pull request is of another repository.
        lost: Words of the ids of jobs whose runner goes away.
        killed: Words of the ids of jobs that are killed in a test.
        expected: Texts of the summary; a verdict that passes has no others.
    """

    name: str
    fails: bool = False
    waits: bool = False
    differs: bool = False
    trains: bool = True
    is_of_fork: bool = False
    lost: str | None = None
    killed: str | None = None
    is_green: bool = False
    expected: tuple[str, ...] = ()


SCENARIOS = (
    Scenario(name="green", is_green=True, expected=("passed: 4 items in 4 jobs",)),
    Scenario(
        name="failing-shard",
        fails=True,
        trains=False,
        expected=("failed: 1 of 4 items", "started on rank 1", "pytest-megatron repro"),
    ),
    Scenario(
        name="mismatch",
        differs=True,
        expected=("failed: 1 of 4 items", "lm loss, step 1: observed 2, golden 1", WORKLOAD),
    ),
    Scenario(
        name="missing-job",
        trains=False,
        lost="more",
        expected=("1 of 3 jobs has a problem", "is in the plan and left nothing"),
    ),
    Scenario(
        name="killed-job",
        trains=False,
        waits=True,
        killed="more",
        expected=(
            "1 of 3 jobs has a problem",
            "left no run.json: it was killed early, or pytest did not start",
        ),
    ),
    Scenario(name="fork", is_of_fork=True, is_green=True, expected=("passed: 4 items in 4 jobs",)),
)


def simulate(scenario: Scenario, root: Path) -> tuple[Simulation, dict[str, str]]:
    """Run one scenario; return it, and the result of each job of the workflow."""
    origin = root / "origin"
    make_project(
        origin,
        fails=scenario.fails,
        waits=scenario.waits,
        differs=scenario.differs,
        trains=scenario.trains,
    )
    ids = job_ids(origin)
    repository: JsonValue = {"full_name": "other/tiny" if scenario.is_of_fork else "tiny/tiny"}
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


def problems_of(scenario: Scenario, simulation: Simulation, results: dict[str, str]) -> list[str]:
    """Return what is not as the scenario expects."""
    found = [] if (results["verdict"] == "success") is scenario.is_green else [f"verdict {results}"]
    return found + [f"no {text!r}" for text in scenario.expected if text not in simulation.summary]


def gitlab_problems(root: Path) -> list[str]:
    """Run GitLab's pipelines on the same project; return what is not green."""
    pipelines = Pipelines(origin=root / "origin", root=root / "gitlab")
    results = pipelines.run(GITLAB_FILE)
    bad = [name for name, is_good in results.items() if not is_good]
    return [f"GitLab's {name}: {pipelines.outputs[name]}" for name in bad]


def main() -> int:
    """Run the scenarios and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = [scenario.name for scenario in SCENARIOS]
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help=", ".join(names))
    parser.add_argument("--keep", type=Path)
    asked = parser.parse_args()
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    base = asked.keep or Path(tempfile.mkdtemp(prefix="simulated-ci-"))
    has_failed = False
    for scenario in (s for s in SCENARIOS if s.name in (asked.scenarios or names)):
        started = time.monotonic()
        simulation, results = simulate(scenario, base.resolve() / scenario.name)
        problems = problems_of(scenario, simulation, results)
        if scenario.name == "green":
            problems += gitlab_problems(base.resolve() / scenario.name)
        has_failed = has_failed or bool(problems)
        state = f"NOT AS EXPECTED: {'; '.join(problems)}" if problems else "as expected"
        print(
            f"{scenario.name}: {results}, {time.monotonic() - started:.1f} s: {state}", flush=True
        )
        for step in simulation.steps if problems else ():
            print(f"--- {step.job}, {step.name}: {step.returncode}\n{step.output}")
    if asked.keep is None and not has_failed:
        shutil.rmtree(base)
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())

"""An engine that runs each order in a job's own process, and jobs to hand to any engine."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tiny_project import Project

from pytest_megatron.runs.environment import gather_facts
from pytest_megatron.runs.layout import item_dirs
from pytest_megatron.workloads.engine.api import (
    EngineContext,
    Resources,
    Submission,
    SubmissionOutcome,
    SubmissionPhase,
    Update,
)
from pytest_megatron.workloads.engine.records import JobSpec, outcome_of, read_record, write_spec
from pytest_megatron.workloads.recipe.case import case_path, read_case
from pytest_megatron.workloads.recipe.load import load_recipe
from pytest_megatron.workloads.recipe.model import Workload
from pytest_megatron.workloads.training.plan.plan import Setting
from pytest_megatron.workloads.training.run.runner import Progress
from pytest_megatron.workloads.verdict.attempt import Attempt
from pytest_megatron.workloads.verdict.job import WorkloadJob
from pytest_megatron.workloads.verdict.retry import RetryPolicy


class Silent:
    """A listener that wants to know nothing."""

    def on_lines(self, lines: list[str]) -> None: ...

    def on_progress(self, phase: str, progress: Progress) -> None: ...


class AlwaysAgain:
    """Retries that nobody limits."""

    def claim(self, _attempt: Attempt) -> str | None:
        return None

    def on_retry(self, _attempt: Attempt, _pause_s: float) -> None: ...


class WorkerEngine:
    """Runs the worker's line here; `env` is what the job has and the controller has not.

    Attributes:
        before: Words before the line, such as those of srun.
        options: Of every spec.
    """

    name = "worker"
    is_queue = False
    interval_s = 0.0

    def __init__(self, context: EngineContext, env: dict[str, str] | None = None) -> None:
        self._context = context
        self._env = env or {}
        self.before: tuple[str, ...] = ()
        self.options: dict[str, str] = {}
        self._waiting: list[Submission] = []
        self.exit_codes: list[int] = []

    def settle(self, setting: Setting, _workload: Workload) -> Setting:
        return setting

    def lacks(self, _needed: Resources) -> str | None:
        return None

    def submit(self, orders: Sequence[Submission]) -> None:
        self._waiting += orders

    def spec(self, order: Submission) -> Path:
        """Write the spec of an order."""
        planned, directory = order.planned(None), self._context.engine_dir
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{order.key.replace('/', '-')}.json"
        spec = JobSpec(
            key=order.key,
            plan=planned.plan,
            outcome=path.with_suffix(".outcome"),
            root=self._context.root,
            description=json.dumps(planned.description),
            env={},
            watches_gpus=False,
            options=self.options,
        )
        write_spec(path, spec)
        return path

    def poll(self) -> Sequence[Update]:
        order = self._waiting.pop(0)
        path = self.spec(order)
        done = subprocess.run(
            [
                *self.before,
                sys.executable,
                "-m",
                "pytest_megatron.engines.worker",
                str(path),
            ],
            env={**self._context.env, **self._env},
            cwd="/",
            stdout=subprocess.DEVNULL,
            check=False,
        )
        self.exit_codes.append(done.returncode)
        record = read_record(path.with_suffix(".outcome"))
        assert record is not None
        outcome: SubmissionOutcome = outcome_of(record, order.planned(None), self._context.facts)
        return [Update(key=order.key, phase=SubmissionPhase.ENDED, outcome=outcome)]

    def cancel(self, keys: Sequence[str]) -> None: ...

    def close(self) -> None: ...


def context_of(project: Project) -> EngineContext:
    """What an engine of a run in that project is made from."""
    return EngineContext(
        root=project.root,
        run_dir=project.root / "run",
        facts=gather_facts(project.root),
        env=project.env(),
    )


def job_of(project: Project, case: str, *, num_repeats: int = 1) -> WorkloadJob:
    """The job of the one row of a case."""
    (workload,) = [
        row for row in load_recipe(project.root / "recipes" / "tiny.yaml") if row.test_case == case
    ]
    node_id = f"recipes/tiny.yaml::{case}[dev-cpu]"
    return WorkloadJob(
        node_id=node_id,
        workload=workload,
        case=read_case(case_path(project.root, workload)),
        dirs=item_dirs(project.root / "run", node_id),
        setting=Setting(root=project.root, env=project.env(), tee_ranks=(), is_lightweight=False),
        num_repeats=num_repeats,
        retry=RetryPolicy(backoff_s=0.0),
    )

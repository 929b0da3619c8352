"""Job steps of several tasks under a real srun, on the Slurm lab: two pretend nodes."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from labs import SlurmLab
from slurm_orders import Run
from test_tasks import Step, paused, wait_for
from typing_extensions import override
from worker_engine import AlwaysAgain, Silent, WorkerEngine

from pytest_megatron.engines.slurm.shape import STEP_FLAGS
from pytest_megatron.engines.slurm.states import (
    SQUEUE_FORMAT,
    SlurmJob,
    outcome_with,
    parse_squeue,
)
from pytest_megatron.runs.environment import gather_facts
from pytest_megatron.runs.layout import item_dirs
from pytest_megatron.workloads.engine.api import EngineContext, EngineError, Planned, TroubleKind
from pytest_megatron.workloads.engine.records import JobRecord, JobSpec, read_record, write_spec
from pytest_megatron.workloads.golden.policy import ComparisonPolicy
from pytest_megatron.workloads.golden.store import golden_path, read_golden
from pytest_megatron.workloads.recipe.case import case_path, read_case
from pytest_megatron.workloads.recipe.load import load_recipe
from pytest_megatron.workloads.training.plan.plan import Setting
from pytest_megatron.workloads.verdict.attempt import Verdict
from pytest_megatron.workloads.verdict.compare import judge
from pytest_megatron.workloads.verdict.driver import train
from pytest_megatron.workloads.verdict.job import WorkloadJob, check_job
from pytest_megatron.workloads.verdict.retry import RetryPolicy

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[3]
RECIPE = """\
type: basic
format_version: 1
spec:
  model: gpt
  nodes: 2
  gpus: 1
  training_script_path: tests/functional_tests/train_gpt.py
products:
  - test_case: [pp2]
    products:
      - {environment: [dev], scope: [mr-github], platforms: [cpu]}
"""


def test_a_gpt_on_two_nodes_has_the_curve_of_its_golden(
    slurm_lab: SlurmLab, tmp_path: Path
) -> None:
    (tmp_path / "multi.yaml").write_text(RECIPE)
    (workload,) = load_recipe(tmp_path / "multi.yaml")
    facts = gather_facts(ROOT)
    context = EngineContext(root=ROOT, run_dir=tmp_path, facts=facts, env=slurm_lab.env)
    engine = WorkerEngine(context)
    engine.before = ("srun", "--nodes=2", "--ntasks-per-node=1", "--time=2")
    engine.options = {"mode": "srun-native"}
    job = WorkloadJob(
        node_id="multi.yaml::pp2[dev-cpu]",
        workload=workload,
        case=read_case(case_path(ROOT, workload)),
        dirs=item_dirs(tmp_path, "multi"),
        setting=Setting(root=ROOT, env=dict(os.environ), tee_ranks=(), is_lightweight=False),
        num_repeats=1,
        retry=RetryPolicy(max_attempts=1),
    )
    training = train(check_job(job), facts, Silent(), AlwaysAgain(), engine)
    assert [attempt.cause for attempt in training.attempts] == [None]
    assert training.verdict is Verdict.PASSED
    golden = read_golden(golden_path(ROOT, replace(workload, nodes=1)))
    assert not judge(training, golden, ComparisonPolicy.STRICT, facts).failed
    logs = training.attempts[0].dirs.phase(1).logs
    assert sorted(path.name for path in logs.iterdir()) == ["0", "1"]


class Job(Step):
    """A job of two nodes whose step is as the engine starts it."""

    def __init__(self, root: Path, lab: SlurmLab, spec: JobSpec) -> None:
        super().__init__(root=root, tasks=[])
        self._lab = lab
        planned = Planned(plan=spec.plan, description={})
        self._submission = replace(Run(root).order("item"), planned=lambda _devices: planned)
        write_spec(root / "spec.json", spec)
        worker = (sys.executable, "-m", "pytest_megatron.engines.worker", str(root / "spec.json"))
        script = f"#!/bin/bash\nsrun --chdir {root} {shlex.join([*STEP_FLAGS, *worker])}\n"
        (root / "job.sh").write_text(script)
        flags = ("--nodes=2", "--ntasks-per-node=1", "--time=3", f"--output={root}/job.log")
        self.number = lab.submit("--no-requeue", *flags, str(root / "job.sh"), cwd=root)

    def ended(self, *states: str) -> JobRecord:
        """Wait for the end of the job, in one of these states; return what it recorded."""
        state = self._lab.wait_for(self.number)
        log = (self.root / "job.log").read_text()
        assert state in states, log
        wait_for(lambda: not self.alive())
        found = read_record(self.root / "outcome.json")
        assert found is not None, log
        return found

    def state(self) -> SlurmJob:
        """Return what Slurm says of the job."""
        words = ("squeue", "-h", "-O", SQUEUE_FORMAT, "-j", str(self.number), "--states=all")
        (found,) = parse_squeue(self._lab.ask(*words))
        return found

    def trouble(self) -> EngineError:
        """Return what the engine makes of the end of the job, which is worth another attempt."""
        job = self.state()
        record, log = read_record(self.root / "outcome.json"), self.root / "job.log"
        outcome = outcome_with(self._submission, record, job, gather_facts(self.root), log)
        assert outcome.trouble is not None
        return outcome.trouble

    @override
    def alive(self) -> list[int]:
        """The processes of the job: the lab's nodes are this machine."""
        number = str(self.number)
        return [p.pid for p in psutil.process_iter() if job_of(p) == number]

    def task(self, number: int) -> psutil.Process:
        """The process that Slurm started as a task."""
        (found,) = [
            p
            for p in map(psutil.Process, self.alive())
            if p.environ().get("SLURM_PROCID") == str(number)
            and "pytest_megatron.engines.worker" in p.cmdline()
        ]
        return found

    def host_of(self, task: int) -> str:
        return self.task(task).environ()["SLURMD_NODENAME"]


def job_of(process: psutil.Process) -> str | None:
    try:
        return process.environ().get("SLURM_JOB_ID")
    except psutil.Error:
        return None


def test_a_task_that_is_killed_ends_the_others_and_is_named(
    slurm_lab: SlurmLab, tmp_path: Path
) -> None:
    job = Job(tmp_path, slurm_lab, paused(tmp_path))
    job.wait_until_met(2)
    host = job.host_of(1)
    job.task(1).kill()
    record = job.ended("FAILED")
    assert record.trouble is not None
    assert record.trouble.kind is TroubleKind.CANCELLED  # for all that task 0 knows
    trouble = job.trouble()
    assert (trouble.kind, trouble.hosts, trouble.is_transient) == (TroubleKind.LOST, (host,), None)
    what = "srun ended its tasks, as one was killed or a node was lost"
    assert trouble.text == f"job {job.number} on {job.state().nodes}: {what}: {host}"


def test_a_step_that_is_ended_is_no_success(slurm_lab: SlurmLab, tmp_path: Path) -> None:
    job = Job(tmp_path, slurm_lab, paused(tmp_path))
    job.wait_until_met(2)
    slurm_lab.ask("scancel", f"{job.number}.0")
    assert slurm_lab.wait_for(job.number) == "FAILED"
    assert job.trouble().kind is TroubleKind.LOST


def test_a_node_that_is_lost_ends_the_others_and_is_named(
    slurm_lab: SlurmLab, tmp_path: Path
) -> None:
    job = Job(tmp_path, slurm_lab, paused(tmp_path))
    job.wait_until_met(2)
    host = job.host_of(1)
    try:
        slurm_lab.kill_node(int(host.removeprefix("node")))
        job.ended("NODE_FAIL", "FAILED")
    finally:
        slurm_lab.fix()
    trouble = job.trouble()
    assert trouble.kind in (TroubleKind.LOST, TroubleKind.NODE_FAIL)
    assert trouble.hosts == (host,)

"""Job steps of several tasks under a real srun, on the Slurm lab: two pretend nodes."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

from labs import SlurmLab
from test_tasks import Step, plan_of, spec_of
from worker_engine import AlwaysAgain, Silent, WorkerEngine

from pytest_megatron.runs.environment import gather_facts
from pytest_megatron.runs.layout import item_dirs
from pytest_megatron.workloads.engine.api import EngineContext
from pytest_megatron.workloads.engine.records import read_record, write_spec
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


def test_launchers_under_srun_make_one_training(slurm_lab: SlurmLab, tmp_path: Path) -> None:
    spec = spec_of(tmp_path, plan_of(tmp_path, (), 2, 2))
    write_spec(tmp_path / "spec.json", spec)
    words = ("srun", "--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=2", "--time=2")
    worker = (
        sys.executable,
        "-m",
        "pytest_megatron.engines.worker",
        str(tmp_path / "spec.json"),
    )
    done = slurm_lab.run(*words, *worker, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "[rank3]: rank 3 has met 4" in done.stdout.splitlines()
    record = read_record(spec.outcome)
    assert record is not None
    assert (len(record.hosts), record.trouble) == (2, None)
    found = Step(root=tmp_path, tasks=[])
    assert [found.shown(rank, "LOCAL_RANK") for rank in range(4)] == ["0", "1", "0", "1"]
    assert {found.shown(rank, "CUDA_VISIBLE_DEVICES") for rank in range(4)} == {"0,1"}

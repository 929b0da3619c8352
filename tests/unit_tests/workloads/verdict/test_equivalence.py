"""Real traces of a training, as the phases of an attempt leave them, compared and judged."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_megatron.base.files import JsonValue
from pytest_megatron.errors import MetricsError
from pytest_megatron.runs.layout import AttemptDirs, ItemDirs
from pytest_megatron.workloads.golden.compare.result import ComparisonRule
from pytest_megatron.workloads.recipe.case import read_case
from pytest_megatron.workloads.recipe.model import Row, parse_row
from pytest_megatron.workloads.training.plan.plan import AttemptPlan, Setting, plan_attempt
from pytest_megatron.workloads.training.plan.trace_settings import VARIABLE, TraceSettings
from pytest_megatron.workloads.verdict.attempt import Attempt
from pytest_megatron.workloads.verdict.driver import judge_files
from pytest_megatron.workloads.verdict.equivalence import compare_traces, judge_equivalence
from pytest_megatron.workloads.verdict.job import WorkloadJob
from pytest_megatron.workloads.verdict.retry import RetryPolicy

PROGRAM = """
import torch
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    words = torch.randint(8, (4, 7))
    optimizer.zero_grad()
    scores = model(words[:, :-1]).flatten(0, 1)
    torch.nn.functional.cross_entropy(scores, words[:, 1:].flatten()).backward()
    optimizer.step()
"""
SPEC: dict[str, JsonValue] = {
    "model": "gpt",
    "test_case": "tiny",
    "environment": "dev",
    "platforms": "cpu",
    "scope": "L0",
    "cadence": ["pr"],
    "gpus": 2,
    "training_script_path": "train.py",
    "equivalent_to": {"gpus": 1},
}


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trace of two steps of a training on one rank."""
    directory = tmp_path_factory.mktemp("trace")
    (directory / "train.py").write_text(PROGRAM)
    settings = TraceSettings(directory=directory / "trace", values="full")
    subprocess.run(
        [sys.executable, "-m", "pytest_megatron.trace.run", str(directory / "train.py")],
        env={**os.environ, VARIABLE: settings.to_json(), "OMP_NUM_THREADS": "1"},
        check=True,
    )
    return settings.directory


@pytest.fixture
def dirs(tmp_path: Path, trace: Path) -> AttemptDirs:
    """An attempt whose three phases computed the same."""
    dirs = ItemDirs(root=tmp_path / "item").attempt(repeat=1, attempt=1)
    for number in (1, 2, 3):
        shutil.copytree(trace, dirs.phase(number).trace)
    dirs.initial_weights.mkdir()
    return dirs


def job_of(dirs: AttemptDirs) -> tuple[WorkloadJob, AttemptPlan]:
    root = dirs.root.parents[2]
    case = root / "model_config.yaml"
    case.write_text("TEST_TYPE: regular\nMODEL_ARGS: {--train-iters: 5}\n")
    job = WorkloadJob(
        node_id="recipes/r.yaml::tiny[dev-cpu-equivalent]",
        workload=parse_row(
            Row(line=7, spec=SPEC, axes=()), file=Path("recipes/r.yaml"), variant=("equivalent",)
        ),
        case=read_case(case),
        dirs=ItemDirs(root=dirs.root.parents[1]),
        setting=Setting(root=root, env=os.environ, tee_ranks=(), is_lightweight=False),
        num_repeats=1,
        retry=RetryPolicy(),
    )
    return job, plan_attempt(job.workload, job.case, dirs, job.setting, repeat=1)


def judged(dirs: AttemptDirs) -> Attempt:
    attempt = Attempt(repeat=1, number=1, dirs=dirs, ends=(), metrics=(), cause=None)
    job, plan = job_of(dirs)
    return judge_files(job, plan, attempt)


def lines_of(dirs: AttemptDirs, phase: int) -> tuple[Path, list[str]]:
    path = dirs.phase(phase).trace / "rank_0.jsonl"
    return path, path.read_text().splitlines(keepends=True)


def test_equal_traces_agree_and_their_values_are_removed(dirs: AttemptDirs) -> None:
    attempt = judged(dirs)
    assert attempt.cause is None
    assert attempt.equivalence is not None
    assert attempt.equivalence.verdict == "equal"
    answer = judge_equivalence(attempt.equivalence, "equivalence.json")
    assert (answer.passed, answer.rule) == (True, ComparisonRule.EQUIVALENCE)
    assert sorted(path.name for path in dirs.root.rglob("rank_*")) == ["rank_0.jsonl"] * 3
    assert not dirs.initial_weights.exists()


def test_the_first_tensor_that_differs_is_named(dirs: AttemptDirs) -> None:
    _, lines = lines_of(dirs, 3)
    rows = [json.loads(line) for line in lines]
    (changed,) = [
        row
        for row in rows
        if row.get("phase") == "gradient" and row["module"] == "1" and row["tensor"] == "bias"
        if row["step"] == 1
    ]
    start, length = changed["at"]
    values = dirs.phase(3).trace / "rank_0.bin"
    content = bytearray(values.read_bytes())
    content[start : start + length] = bytes(length)
    values.write_bytes(content)
    attempt = judged(dirs)
    assert attempt.equivalence is not None
    assert attempt.equivalence.divergences[0].parameter == "1.bias"
    assert attempt.equivalence.num_divergences == 1
    answer = judge_equivalence(attempt.equivalence, "equivalence.json")
    assert (answer.passed, answer.metric) == (False, "1.bias, gradient")
    assert values.exists()


def test_a_trace_that_is_cut_off_is_a_cause(dirs: AttemptDirs) -> None:
    path, lines = lines_of(dirs, 3)
    path.write_text("".join(lines[: len(lines) // 3]))
    cause = judged(dirs).cause
    assert cause is not None
    assert cause.text.startswith("the traces cannot be compared: ")
    assert "phase_3" in cause.text
    assert not cause.is_transient


def test_a_program_without_modules_is_a_cause(dirs: AttemptDirs) -> None:
    problem = "the program called no torch.nn.Module with gradients"
    for number in (1, 2, 3):
        path, lines = lines_of(dirs, number)
        end = json.dumps({"end": True, "steps": 0, "problem": problem})
        path.write_text(f"{lines[0]}{end}\n")
    cause = judged(dirs).cause
    assert cause is not None
    assert problem in cause.text


def test_other_data_are_a_cause_and_no_difference(dirs: AttemptDirs) -> None:
    path, lines = lines_of(dirs, 3)
    rows = [json.loads(line) for line in lines]
    (words,) = [
        row
        for row in rows
        if row.get("tensor") == "input.0" and row["dtype"] == "int64"
        if row["step"] == 1 and not row["module"]
    ]
    start, length = words["at"]
    values = path.with_suffix(".bin")
    content = bytearray(values.read_bytes())
    content[start : start + length] = bytes(length)
    values.write_bytes(content)
    cause = judged(dirs).cause
    assert cause is not None
    assert "the traces cannot be compared" in cause.text


def test_a_phase_without_a_trace_is_one_error(dirs: AttemptDirs) -> None:
    shutil.rmtree(dirs.phase(3).trace)
    cause = judged(dirs).cause
    assert cause is not None
    assert "\n" not in cause.text
    assert str(dirs.phase(3).trace) in cause.text


def test_a_comparison_that_leaves_no_result_is_its_last_line(dirs: AttemptDirs) -> None:
    (dirs.root / "numpy.py").write_text("raise ImportError('numpy is broken')\n")
    with pytest.raises(MetricsError, match="cannot be compared: ImportError: numpy is broken"):
        compare_traces(sys.executable, dirs, {"PYTHONPATH": str(dirs.root)})

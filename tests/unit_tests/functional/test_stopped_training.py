"""Real trainings of the small GPT that can only fail, and are stopped long before their end."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tiny_project import Project, Run

from pytest_megatron.base.files import JsonValue
from pytest_megatron.workloads.golden.model import Provenance, series_of
from pytest_megatron.workloads.golden.store import write_golden

PROGRAMS = Path(__file__).resolve().parents[2] / "functional_tests"
ITERS = 5_000  # a minute or two
TINY: dict[str, JsonValue] = {
    "num_layers": 1,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "seq_length": 16,
    "train_iters": ITERS,
    "lr_decay_style": "constant",
    "deterministic_mode": True,
    "log_timers_to_tensorboard": True,
    "save": None,
    "load": None,
}
BITWISE = "format_version: 1\ninherit: strict\nmetrics:\n  lm loss: {exact: always}\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    project = Project(root=tmp_path_factory.mktemp("stopped"), gpus=1, has_torch=True)
    for program in PROGRAMS.glob("*.py"):
        shutil.copy(program, project.root)
    (project.root / "train.py").unlink()
    (project.root / "train_gpt.py").rename(project.root / "train.py")
    (project.root / "bitwise.yaml").write_text(BITWISE)
    add(project, "differs", 2)
    add(project, "nan", 3, fault="nan@3", no_check_for_nan_in_loss_and_grad=True)
    return project.run("recipes", "--golden-policy", "bitwise.yaml")


def add(project: Project, case: str, first: int, **changed: JsonValue) -> None:
    """Add a training, with a golden that no loss equals from a step on, and of no step before."""
    config: dict[str, JsonValue] = {"METRICS": ["lm loss"]}
    arguments = {**TINY, **changed}
    project.case(case, config=config, env=None, **arguments)
    project.row(case, write_golden=False)
    series = series_of(dict.fromkeys(range(first, ITERS + 1), 1.0), is_full_precision=True)
    path = project.golden_path(case)
    path.parent.mkdir(parents=True)
    write_golden(path, {"lm loss": series}, Provenance(deterministic=True, repeats=2))


@pytest.mark.parametrize(
    ("case", "what"),
    [
        ("differs", "lm loss is off at step 2"),
        ("nan", "lm loss is nan at step 3, the first that is not finite"),
    ],
)
def test_a_training_that_can_only_fail_is_stopped(run: Run, case: str, what: str) -> None:
    assert run.verdict(case) == ("FAILED", "failed")
    problem = run.problem(case)
    assert f" of {ITERS}: {what}" in problem
    assert "stopped early: saved about" in problem
    (attempt,) = run.attempts(case)
    stopped = attempt["stopped"]
    assert isinstance(stopped, dict)
    assert isinstance(stopped["iteration"], int)
    assert stopped["iteration"] < ITERS
    assert isinstance(stopped["saved_s"], float)
    assert stopped["saved_s"] > 1


def test_the_comparison_of_the_stopped_one_is_that_of_the_end(run: Run) -> None:
    problem = run.problem("differs")
    assert "\n    lm loss, step 2: observed " in problem
    assert "tolerance allows 0.0e+00" in problem
    assert (run.item_dir("differs") / "comparison.json").is_file()
    assert not (run.item_dir("nan") / "comparison.json").exists()

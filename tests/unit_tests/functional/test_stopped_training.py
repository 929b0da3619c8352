"""Real trainings of the small GPT that can only fail, and are stopped long before their end."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_project import Project, Run

from pytest_megatron.base.files import JsonValue
from pytest_megatron.golden.model import Provenance, series_of
from pytest_megatron.golden.store import read_metrics, write_golden

PROGRAMS = Path(__file__).resolve().parents[2] / "functional_tests"
ITERS, RECORDED = 5_000, 4  # a minute or two; and what a golden is made of
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
    add(project, "sound", train_iters=RECORDED)
    recorded = project.run("recipes", "--golden", "off", run_dir="recorded")
    assert recorded.verdict("sound") == ("PASSED", "passed"), recorded.text
    add(project, "rate", lr=2e-3)
    add(project, "nan", fault="nan@3", no_check_for_nan_in_loss_and_grad=True)
    for case in ("rate", "nan"):
        give_golden(project, case, recorded)
    return project.run("recipes", "-k", "not sound", "--golden-policy", "bitwise.yaml")


def add(project: Project, case: str, **changed: JsonValue) -> None:
    config: dict[str, JsonValue] = {"METRICS": ["lm loss"]}
    arguments = {**TINY, **changed}
    project.case(case, config=config, env=None, **arguments)
    project.row(case, write_golden=False)


def give_golden(project: Project, case: str, recorded: Run) -> None:
    """Write what was recorded as the golden of a case, as if it had gone on at its last loss."""
    directory = recorded.item_dir("sound") / "repeat_1" / "attempt_1" / "phase_1"
    loss = read_metrics(directory / "tensorboard").metrics["lm loss"]
    assert len(loss) == RECORDED
    whole = {**dict.fromkeys(range(1, ITERS + 1), loss.values[-1]), **dict(loss.items())}
    series = replace(series_of(whole), is_full_precision=True)
    path = project.golden_path(case)
    path.parent.mkdir(parents=True)
    write_golden(path, {"lm loss": series}, Provenance(deterministic=True, repeats=2))


@pytest.mark.parametrize(
    ("case", "what"),
    [
        ("rate", "lm loss is off at step 2"),
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
    problem = run.problem("rate")
    assert "\n    lm loss, step 2: observed " in problem
    assert "tolerance allows 0.0e+00" in problem
    assert (run.item_dir("rate") / "comparison.json").is_file()
    assert not (run.item_dir("nan") / "comparison.json").exists()

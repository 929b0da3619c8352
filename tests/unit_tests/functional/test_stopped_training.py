"""A real training of the small GPT that is stopped long before its end: a loss is not finite."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tiny_project import Project

from pytest_megatron.base.files import JsonValue

pytestmark = pytest.mark.nightly

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


def test_a_training_with_a_loss_that_is_not_finite_is_stopped(tmp_path: Path) -> None:
    project = Project(root=tmp_path, gpus=1, has_torch=True)
    for program in PROGRAMS.glob("*.py"):
        shutil.copy(program, project.root)
    (project.root / "train.py").unlink()
    (project.root / "train_gpt.py").rename(project.root / "train.py")
    config: dict[str, JsonValue] = {"METRICS": ["lm loss"]}
    changed: dict[str, JsonValue] = {"fault": "nan@3", "no_check_for_nan_in_loss_and_grad": True}
    project.case("nan", config=config, env=None, **{**TINY, **changed})
    project.row("nan", write_golden=False)
    run = project.run("recipes", "--golden", "off")
    assert run.verdict("nan") == ("FAILED", "failed")
    problem = run.problem("nan")
    assert f" of {ITERS}: lm loss is nan at step 3, the first that is not finite" in problem

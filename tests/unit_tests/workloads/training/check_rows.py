"""Rows and cases for the tests of the checks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from recipe_rows import row_of

from pytest_megatron.workloads.recipe.case import (
    Argument,
    CaseMode,
    Evaluation,
    Launcher,
    TestType,
    Variant,
    WorkloadCase,
)
from pytest_megatron.workloads.recipe.model import Workload

FILE = Path("gpt/model_config.yaml")
# A sound model on 16 ranks: TP 2 x PP 2 x CP 2, so DP 2.
SOUND: Mapping[str, str] = {
    "--num-layers": "8",
    "--hidden-size": "512",
    "--num-attention-heads": "8",
    "--seq-length": "1024",
    "--micro-batch-size": "2",
    "--global-batch-size": "16",
    "--tensor-model-parallel-size": "2",
    "--pipeline-model-parallel-size": "2",
    "--context-parallel-size": "2",
    "--sequence-parallel": "true",
    "--bf16": "true",
}


def row(**changes: str | int) -> Workload:
    usual: dict[str, str | int] = {"platforms": "dgx_h100", "gpus": 8, "nodes": 2}
    return row_of(**{**usual, "training_script_path": "train.py", **changes})


def case(
    changes: Mapping[str, str | None] | None = None,
    *,
    env: Mapping[str, str] | None = None,
    mode: CaseMode = CaseMode.PRETRAINING,
    evaluation: Evaluation = Evaluation.PASS,
    sound: Mapping[str, str] = SOUND,
    before_script: str | None = None,
) -> WorkloadCase:
    """Return a case with the sound arguments, some of them changed or, with None, left out."""
    given = {k: v for k, v in {**sound, **(changes or {})}.items() if v is not None}
    arguments = tuple(
        Argument(name=name, text=text, line=line)
        for line, (name, text) in enumerate(given.items(), start=10)
    )
    return WorkloadCase(
        path=FILE,
        test_type=TestType.REGULAR,
        mode=mode,
        evaluation=evaluation,
        starter=Launcher.TORCHRUN,
        variants=(Variant(key="MODEL_ARGS", number=1, arguments=arguments, env={}),),
        env=env or {},
        metrics=None,
        before_script=before_script,
        after_script=None,
        expected_failure=None,
        gradient_tolerance=None,
    )

"""Gradients in real checkpoints of torch's distributed format, and how they are judged."""

from __future__ import annotations

import math
import os
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from pytest_megatron.base.files import JsonValue
from pytest_megatron.errors import MetricsError
from pytest_megatron.workloads.golden.compare.result import Comparison, render
from pytest_megatron.workloads.recipe.case import read_case
from pytest_megatron.workloads.verdict.gradients import (
    compare_gradients,
    measure_gradients,
    tolerance_of,
)

TOLERANCE = 1e-5
PREFIX = "optimizer.state.exp_avg."
EMBEDDING = "embedding.word_embeddings.weight"
STACKED = "decoder.layers.mlp.linear_fc1.weight"
TINY = "decoder.final_layernorm.bias"
Tensors = dict[str, torch.Tensor]


def sound() -> Tensors:
    generator = torch.Generator().manual_seed(1)
    return {
        EMBEDDING: torch.randn(8, 4, generator=generator),
        STACKED: torch.randn(2, 4, 4, generator=generator),
        TINY: 1e-5 * torch.randn(4, generator=generator),
        "output_layer.weight": torch.randn(8, 4, generator=generator),
    }


def changed(name: str, amount: float, *, at: int | None = None) -> Tensors:
    tensors = sound()
    part = tensors[name] if at is None else tensors[name][at]
    part *= 1 + amount
    return tensors


def write(directory: Path, tensors: Tensors, *, prefix: str = PREFIX) -> Path:
    state: dict[str, object] = {prefix + name: value for name, value in tensors.items()}
    state["decoder.layers.mlp.linear_fc1.weight"] = torch.ones(3)  # a weight is no gradient
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(state, storage_writer=FileSystemWriter(directory))
    return directory


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, JsonValue]]:
    """Every checkpoint measured against a sound one, in one process."""
    root = tmp_path_factory.mktemp("checkpoints")
    without = sound()
    del without[TINY]
    padded = sound()
    padded[EMBEDDING] = torch.cat([padded[EMBEDDING], torch.ones(2, 4)])
    turned = sound()
    turned[STACKED] = turned[STACKED].reshape(2, 2, 8)
    others = {
        "same": sound(),
        "rounding": changed(STACKED, 1e-6),
        "one layer": changed(STACKED, 1e-4, at=1),
        "tiny lost": changed(TINY, -1.0),
        "embedding": changed(EMBEDDING, 1e-3),
        "padded embedding": {**padded, EMBEDDING: padded[EMBEDDING] * 1.001},
        "padding": padded,
        "missing": without,
        "more": {**sound(), "decoder.more": torch.ones(2)},
        "nan": changed(TINY, math.nan, at=2),
        "shape": turned,
        "zero": {name: torch.zeros_like(value) for name, value in sound().items()},
    }
    paths = {name: write(root / name, tensors) for name, tensors in others.items()}
    paths["chained"] = write(root / "chained", sound(), prefix=f"chained_0.{PREFIX}")
    reference = write(root / "reference", sound())
    found = measure_gradients(sys.executable, reference, list(paths.values()), os.environ)
    return dict(zip(paths, found, strict=True))


def failed(answers: tuple[Comparison, ...]) -> list[str]:
    """What disagrees, without the answer that speaks for all."""
    assert answers[0].passed == all(answer.passed for answer in answers[1:])
    return [answer.metric for answer in answers[1:] if not answer.passed]


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        pytest.param("same", [], id="bitwise equal"),
        pytest.param("chained", [], id="of one of several optimizers"),
        pytest.param("rounding", [], id="within the tolerance"),
        pytest.param("one layer", ["decoder.layers.1.mlp.linear_fc1.weight"], id="one layer"),
        pytest.param("tiny lost", [TINY], id="a gradient near zero that is lost"),
        pytest.param("embedding", [EMBEDDING], id="an embedding"),
        pytest.param("padded embedding", [EMBEDDING], id="an embedding with padding"),
        pytest.param("padding", [], id="padding alone"),
        pytest.param("missing", [TINY], id="a gradient that is missing"),
        pytest.param("more", ["decoder.more"], id="a gradient that only one has"),
        pytest.param("nan", [TINY], id="NaN"),
        pytest.param("shape", [STACKED], id="another shape"),
    ],
)
def test_every_gradient_is_judged(
    measured: dict[str, dict[str, JsonValue]], case: str, expected: list[str]
) -> None:
    """Gradients near zero and embeddings are compared like any other."""
    answers = compare_gradients(measured[case], TOLERANCE, name="MODEL_ARGS", where="reference")
    assert failed(answers) == [f"gradient of {name}" for name in expected]


def test_a_difference_names_amount_and_tolerance(
    measured: dict[str, dict[str, JsonValue]],
) -> None:
    """The tolerance is seen."""
    answers = compare_gradients(
        measured["embedding"], TOLERANCE, name="MODEL_ARGS", where="reference"
    )
    (line,) = [render(answer) for answer in answers[1:] if not answer.passed]
    assert line.startswith(f"gradient of {EMBEDDING}: norm of the difference; ")
    assert "; 1.0e-03 of the norm, tolerance allows 1.0e-05; norms " in line
    assert answers[0].notes == (
        "4 of 5 gradients agree, largest difference 1.0e-03 of the norm, tolerance 1.0e-05",
    )


def test_all_zero_on_both_sides_is_no_agreement() -> None:
    row: dict[str, JsonValue] = {
        "name": "w",
        "shape_reference": [2],
        "shape_other": [2],
        "num_padding": 0,
        "num_not_finite": 0,
        "norm_reference": 0.0,
        "norm_other": 0.0,
        "norm_difference": 0.0,
    }
    empty: dict[str, JsonValue] = {"only_in_reference": [], "only_in_other": [], "tensors": []}
    answers = compare_gradients(
        {**empty, "tensors": [row]}, TOLERANCE, name="MODEL_ARGS", where="x"
    )
    assert [answer.passed for answer in answers] == [False, True]
    (nothing,) = compare_gradients(empty, TOLERANCE, name="MODEL_ARGS", where="x")
    assert not nothing.passed


def test_gradients_that_vanish_in_one_layout_fail(
    measured: dict[str, dict[str, JsonValue]],
) -> None:
    answers = compare_gradients(measured["zero"], TOLERANCE, name="MODEL_ARGS", where="reference")
    assert len(failed(answers)) == 5


def test_a_checkpoint_that_cannot_be_read_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(MetricsError, match=r"the checkpoints cannot be compared: .+") as caught:
        measure_gradients(sys.executable, tmp_path, [tmp_path], os.environ)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "tolerance"),
    [
        pytest.param("", 16 * 2.0**-23 * 1.03**3, id="fp32"),
        pytest.param("  --bf16: true\n", 4 * 2.0**-7 * 1.03**3, id="bf16"),
        pytest.param("GRADIENT_TOLERANCE: 1.0e-3\n", 1e-3, id="said by the case"),
    ],
)
def test_the_tolerance_follows_from_the_case(tmp_path: Path, text: str, tolerance: float) -> None:
    """The tolerance grows with the depth and can be set."""
    path = tmp_path / "model_config.yaml"
    path.write_text(f"TEST_TYPE: checkpoint-consistency\nMODEL_ARGS:\n  --num-layers: 2\n{text}")
    assert tolerance_of(read_case(path)) == pytest.approx(tolerance)

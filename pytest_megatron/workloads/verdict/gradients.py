"""Compares the gradients that layouts of a training compute: those of their checkpoints.

Two layouts compute the same gradients but for the order of sums. How far that may lead follows
from the precision and the depth, or is in the case. Source: Megatron-LM
tests/functional_tests/python_test_utils/test_optimizer_grads_match.py, d98e8a64dd, for the amount
that grows by 3 % a layer.
"""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from pytest_megatron.base.files import JsonValue
from pytest_megatron.errors import MetricsError
from pytest_megatron.workloads.golden.compare.result import Comparison, ComparisonRule
from pytest_megatron.workloads.recipe.case import WorkloadCase

_PROGRAM = "pytest_megatron.workloads.verdict.tensors"
_LIMIT_S = 3600.0
# Relative to the norm of a gradient: how many units in the last place of the precision, and by
# how much the error grows from a layer to the one before it.
_EPSILON = {"bf16": 2.0**-7, "fp16": 2.0**-10, "fp32": 2.0**-23}
_FACTOR = {"bf16": 4.0, "fp16": 4.0, "fp32": 16.0}  # fp32 has no reduced sums to be rounded to it
_GROWTH = 1.03
_DEFAULT_LAYERS = 32
# A gradient whose root mean square is below this part of that of all gradients is judged as if it
# had that part: rounding noise is all that is left of a gradient that is zero on paper.
_LEAST_PART = 0.1


def tolerance_of(case: WorkloadCase) -> float:
    """Return the largest norm of a difference, relative to the norm of the gradient."""
    if case.gradient_tolerance is not None:
        return case.gradient_tolerance
    text = case.argument("--num-layers") or ""
    num_layers = int(text) if text.isdecimal() else _DEFAULT_LAYERS
    growth = float(_GROWTH ** (num_layers + 1))
    return _FACTOR[case.precision] * _EPSILON[case.precision] * growth


def measure_gradients(
    python: str, reference: Path, others: Sequence[Path], env: Mapping[str, str]
) -> list[dict[str, JsonValue]]:
    """Return the answer of `workloads/verdict/tensors.py`, one object for each other checkpoint.

    Raises:
        MetricsError: A checkpoint cannot be read; the text is the last line of its output.
    """
    command = [python, "-m", _PROGRAM, str(reference), *map(str, others)]
    done = run_comparison(command, env, where=str(reference))
    if done.returncode:
        raise MetricsError(
            str(reference), f"the checkpoints cannot be compared: {last_words(done)}"
        )
    found: list[dict[str, JsonValue]] = json.loads(done.stdout)
    return found


def run_comparison(
    command: Sequence[str], env: Mapping[str, str], *, where: str
) -> subprocess.CompletedProcess[str]:
    """Run a program that compares tensors, without GPUs.

    Raises:
        MetricsError: It took too long.
    """
    try:
        return subprocess.run(
            command,
            env={**env, "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            check=False,
            timeout=_LIMIT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise MetricsError(where, f"not compared within {_LIMIT_S:g} s") from error


def last_words(done: subprocess.CompletedProcess[str]) -> str:
    """Return the last line of a program's errors, or its exit code where there is none."""
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]


def compare_gradients(
    measured: Mapping[str, JsonValue], tolerance: float, *, name: str, where: str
) -> tuple[Comparison, ...]:
    """Judge every gradient of one checkpoint; the first answer speaks for all of them.

    Args:
        measured: One object of `measure_gradients`.
        tolerance: The result of `tolerance_of`.
        name: What the reference is called, for the messages.
        where: Directory of the checkpoint, named once.

    Returns:
        `all gradients`, which fails where there is none or all are zero, then each of them, the
        one that is farthest apart first.
    """
    rows = [row for row in _list(measured["tensors"]) if isinstance(row, dict)]
    typical = _root_mean_square(rows)
    pairs = [(row, _apart(row, typical)) for row in rows]
    pairs.sort(key=lambda pair: math.inf if pair[1] is None else pair[1], reverse=True)
    answers = [_judge(row, apart, tolerance, name) for row, apart in pairs]
    for rule, names in (
        (ComparisonRule.NO_METRIC, _list(measured["only_in_reference"])),
        (ComparisonRule.NO_GOLDEN, _list(measured["only_in_other"])),
    ):
        answers += [
            Comparison(metric=f"gradient of {one}", passed=False, rule=rule, golden_path=name)
            for one in names
        ]
    largest = max((apart for _, apart in pairs if apart is not None), default=0.0)
    note = (
        f"{sum(answer.passed for answer in answers)} of {len(answers)} gradients agree, "
        f"largest difference {largest:.1e} of the norm, tolerance {tolerance:.1e}"
    )
    return (_all(rows, answers, note, where), *answers)


def _apart(row: Mapping[str, JsonValue], typical: float) -> float | None:
    """Return the norm of the difference relative to that of the gradient; None without one.

    Args:
        row: Row of one gradient.
        typical: Root mean square of all gradients.
    """
    difference = _number(row["norm_difference"])
    if difference is None or row["num_not_finite"]:
        return None
    floor = _LEAST_PART * typical * math.sqrt(_num_values(row))
    scale = max(_number(row["norm_reference"]) or 0.0, floor)
    if not difference:
        return 0.0
    return difference / scale if scale else math.inf


def _judge(
    row: Mapping[str, JsonValue], apart: float | None, tolerance: float, reference: str
) -> Comparison:
    """Judge one gradient, however small it is."""
    notes = []
    rule = ComparisonRule.GRADIENT
    if row["num_not_finite"]:
        rule = ComparisonRule.NOT_FINITE
        notes.append(f"{row['num_not_finite']} values are not finite")
    elif apart is None:
        rule = ComparisonRule.SHAPE
        notes.append(f"{row['shape_other']}, expected {row['shape_reference']}")
    elif apart > tolerance:
        norms = [_number(row[key]) or 0.0 for key in ("norm_reference", "norm_other")]
        notes.append(f"{apart:.1e} of the norm, tolerance allows {tolerance:.1e}")
        notes.append(f"norms {norms[0]:.3e} and {norms[1]:.3e}")
    if row["num_padding"]:
        notes.append(f"{row['num_padding']} rows of padding not compared")
    return Comparison(
        metric=f"gradient of {row['name']}",
        passed=apart is not None and apart <= tolerance,
        rule=rule,
        golden_path=reference,
        notes=tuple(notes),
    )


def _all(
    rows: Sequence[Mapping[str, JsonValue]],
    answers: Sequence[Comparison],
    note: str,
    where: str,
) -> Comparison:
    """Say how many gradients agree, and that there are any."""
    is_zero = not any(_number(row["norm_reference"]) for row in rows)
    if not answers:
        note = (
            "the checkpoints hold no tensor optimizer.*.exp_avg.*, so nothing can be compared; a "
            "distributed optimizer saves them with --dist-ckpt-optim-fully-reshardable"
        )
    elif is_zero:
        note = "all gradients are zero, so nothing is compared"
    return Comparison(
        metric="all gradients",
        passed=bool(answers) and not is_zero and all(answer.passed for answer in answers),
        rule=ComparisonRule.GRADIENT,
        golden_path=where,
        notes=(note,),
    )


def _root_mean_square(rows: Sequence[Mapping[str, JsonValue]]) -> float:
    """Return that of all values of the reference's gradients."""
    squares = math.fsum((_number(row["norm_reference"]) or 0.0) ** 2 for row in rows)
    num_values = sum(_num_values(row) for row in rows)
    return math.sqrt(squares / num_values) if num_values else 0.0


def _num_values(row: Mapping[str, JsonValue]) -> int:
    return math.prod(size for size in _list(row["shape_reference"]) if isinstance(size, int))


def _number(value: JsonValue) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _list(value: JsonValue) -> list[JsonValue]:
    assert isinstance(value, list)
    return value

from __future__ import annotations

import pytest
import torch

from pytest_megatron.trace.files import TensorMeasurement
from pytest_megatron.trace.measure import bits_on_cpu, hash_on_cpu, measure_on_cpu


def measured(tensor: torch.Tensor) -> TensorMeasurement:
    bits = bits_on_cpu(tensor)
    return measure_on_cpu(bits, tensor.dtype, hash_on_cpu(bits))


def test_one_bit_changes_the_hash() -> None:
    values = torch.linspace(-1, 1, 1000)
    other = values.clone()
    other.view(torch.int32)[500] ^= 1
    assert measured(values).hash != measured(other).hash


def test_the_order_of_values_changes_the_hash() -> None:
    values = torch.arange(100)
    assert measured(values).hash != measured(values.flip(0)).hash


def test_a_view_measures_as_its_copy() -> None:
    whole = torch.arange(101, dtype=torch.bfloat16)
    column = torch.arange(64.0).view(8, 8)[:, 1]
    for view in (whole[1:], whole[::2], column, column[0].expand(6)):
        assert measured(view) == measured(view.clone(memory_format=torch.contiguous_format))


def test_values_that_are_not_finite_are_counted() -> None:
    found = measured(torch.tensor([1.0, float("nan"), float("inf")]))
    assert (found.norm, found.mean, found.not_finite) == (None, None, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_autocast_of_the_program_changes_no_measurement(dtype: torch.dtype) -> None:
    values = torch.linspace(-1, 3, 1001).to(dtype)
    plain = measured(values)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert measured(values) == plain

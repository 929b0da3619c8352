from __future__ import annotations

import pytest
import torch

from pytest_megatron.trace.measure import (
    TensorMeasurement,
    flat_values,
    hash_on_cpu,
    measure_on_cpu,
    measure_on_device,
    resolve,
)


def measured(tensor: torch.Tensor) -> TensorMeasurement:
    values = flat_values(tensor)
    return measure_on_cpu(values, hash_on_cpu(values))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
@pytest.mark.parametrize("length", [0, 1, 7, 4096, (1 << 20) + 3])
def test_the_formula_for_a_device_gives_the_same(dtype: torch.dtype, length: int) -> None:
    values = torch.arange(length).to(dtype)
    here, (there,) = measured(values), resolve([measure_on_device(values)])
    assert (here.hash, here.not_finite) == (there.hash, there.not_finite)
    assert [here.norm, here.mean] == pytest.approx([there.norm, there.mean])


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
    odd, column = whole[1:], torch.arange(64).view(8, 8)[:, 1]
    assert measured(odd) == measured(odd.clone())
    assert measured(column) == measured(column.clone())


def test_values_that_are_not_finite_are_counted() -> None:
    found = measured(torch.tensor([1.0, float("nan"), float("inf")]))
    assert (found.norm, found.mean, found.not_finite) == (None, None, 2)

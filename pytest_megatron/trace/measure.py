"""Norm, mean, hash and number of values that are not finite, of one tensor.

The hash is a function of the bits alone: the same on every device, in every order of summation.
It is the sum, modulo 2^64, of the tensor's 64-bit words (32, 16 or 8 bits where the number of
bytes asks for it), each times an odd number that belongs to its place. One word that differs always
changes it; several that do, but for a chance of about 2^-32.

numpy measures on the CPU, wherever the tensor is: its values are stored from there too.
"""

from __future__ import annotations

import functools
import math
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from pytest_megatron.trace.files import TensorMeasurement

Array: TypeAlias = NDArray[np.float64]  # or of another type
_CHUNK = 1 << 20  # words that are hashed at once; part of the definition of the hash
_DOUBLES = 1 << 13  # at once: what is much longer the allocator maps anew each time, page by page
_MASK = (1 << 64) - 1
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


def bits_on_cpu(tensor: torch.Tensor) -> Array:
    """Return the values of a tensor on the CPU one after the other.

    They are integers of the same bits where numpy lacks the type.
    """
    try:
        values = tensor.numpy(force=True)
    except TypeError:
        values = tensor.detach().view(_WORDS[tensor.element_size()]).numpy(force=True)
    values = values.ravel()
    return values.view(values.real.dtype) if values.dtype.kind == "c" else values


def hash_on_cpu(bits: Array) -> str:
    """Return the hash of values on the CPU."""
    words = bits.view(f"i{math.gcd(bits.nbytes, 8)}")
    value = 0
    for number, start in enumerate(range(0, len(words), _CHUNK)):
        chunk = words[start : start + _CHUNK]
        value += int(np.dot(chunk, _multipliers(len(chunk)))) * _odd(number)
    return f"{value & _MASK:016x}"


@np.errstate(invalid="ignore")  # a conversion warns of NaN
def measure_on_cpu(bits: Array, dtype: torch.dtype, digest: str) -> TensorMeasurement:
    """Measure values on the CPU, whose hash is known."""
    squares = total = 0.0
    not_finite = 0
    is_narrow = dtype.is_floating_point and bits.dtype.kind != "f"
    for start in range(0, len(bits), _DOUBLES):
        part = bits[start : start + _DOUBLES]
        if is_narrow:
            part = torch.from_numpy(part).view(dtype).float().numpy()
        doubles = part.astype(np.float64)
        part_squares = float(np.dot(doubles, doubles))
        if not math.isfinite(part_squares):
            not_finite += len(part) - int(np.count_nonzero(np.isfinite(doubles)))
        squares += part_squares
        total += float(np.add.reduce(doubles))
    is_finite = math.isfinite(squares) and not not_finite
    return TensorMeasurement(
        norm=math.sqrt(squares) if is_finite else None,
        mean=total / len(bits) if is_finite and len(bits) else None,
        not_finite=not_finite,
        hash=digest,
    )


@functools.lru_cache(maxsize=1 << 12)
def _odd(number: int) -> int:
    """Return a fixed odd number of 64 bits for a place."""
    mixed = (number + 1) * 0x9E3779B97F4A7C15 & _MASK
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK
    return mixed ^ mixed >> 31 | 1


def _multipliers(length: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return `_odd` of the first places; few at first, as most tensors are small."""
    return _all_multipliers(1 << max(length - 1, 1).bit_length())[:length]


@functools.lru_cache(maxsize=4)
def _all_multipliers(length: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return a fixed random factor for each place of a hash."""
    with np.errstate(over="ignore"):
        mixed = np.arange(1, length + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ mixed >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ mixed >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return (mixed ^ mixed >> np.uint64(31) | np.uint64(1)).view(np.int64)

"""Compares two traces tensor by tensor and finds the first that differs; a program.

    python -m pytest_megatron.trace.compare REFERENCE CANDIDATE [--noise NOISE] [--output FILE]

All are directories of traces with values. The reference's tensors are cut as the candidate's ranks
hold theirs, one tensor of a step at a time. Exit code 0: equal; 1: different; 2: unusable. Reads
values with numpy alone; never imported by the controller, whose JSON is `divergences.py`.
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pytest_megatron.errors import TraceError
from pytest_megatron.trace.divergences import (
    MOST_DIVERGENCES,
    PHASES,
    DivergenceKind,
    NotCompared,
    Phase,
    TensorDivergence,
    TraceComparison,
    as_text,
    write_comparison,
)
from pytest_megatron.trace.hints import Layouts, hint_of
from pytest_megatron.trace.merge import (
    EPSILONS,
    Axes,
    Index,
    Microbatch,
    NotMergedError,
    Piece,
    Samples,
    Step,
    TensorName,
    Trace,
    Values,
    axes_of,
    axis_chunks,
    is_expert,
    is_padded,
    products,
    read_samples,
    sequence_chunks,
    split_sizes,
)

_Real = NDArray[np.float64]
_EXIT_CODES = {"equal": 0, "different": 1, "unusable": 2}

# An error counts beyond this multiple of the noise; docs/reference/traces.md has the experiment.
_FACTOR = 8.0
# The least limit, in units of the precision that the run computes in.
_LEAST_LIMIT = 4.0
# A tensor's error is relative to its norm, or to this part of what is usual in the phase: rounding
# is all that is left of a gradient that is zero on paper.
_LEAST_PART = 0.01
_REPLICA_LIMIT = 8.0  # of ranks that hold the same part, in units of the tensor's precision
# Tokens of a micro-batch whose router may choose another expert, as two of them are level.
_MOST_LEVEL = {"bfloat16": 0.04, "float16": 0.02, "float32": 0.002, "float64": 0.0}
_LEVEL_EFFECT = 2.0
_LEAST_MODULES = 0.5  # part of the reference's modules that has to be compared


@dataclass(slots=True)
class _Found:
    """The difference of one whole tensor, summed over the parts that ranks hold."""

    order: int
    microbatch: int
    squares: float = 0.0  # of the reference
    other_squares: float = 0.0
    error_squares: float = 0.0
    num_values: int = 0
    num_whole: int = 0
    not_finite: bool = False
    parts: dict[tuple[object, ...], Piece] = field(default_factory=dict)
    ranks: dict[int, tuple[float, float, int]] = field(default_factory=dict)
    disagreement: float = 0.0
    disagreeing: set[int] = field(default_factory=set)
    kind: DivergenceKind = "value"

    def error(self, usual: float) -> float:
        """Return the relative error; `usual` is the root mean square that the phase has."""
        return _relative(self.error_squares, self.squares, self.num_values, usual)


def _relative(error_squares: float, squares: float, num_values: int, usual: float) -> float:
    if not error_squares:
        return 0.0
    least = (_LEAST_PART * usual) ** 2 * num_values
    scale = max(squares, least)
    return math.sqrt(error_squares / scale) if scale else math.inf

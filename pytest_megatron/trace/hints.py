"""Likely causes of a first divergence, by what is known of bugs in parallel training. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from pytest_megatron.base.text import name_ranks
from pytest_megatron.trace.divergences import TensorDivergence
from pytest_megatron.trace.files import TraceLayout

_NEAR = 0.02  # of a ratio to a size
_EMBEDDING = re.compile(r"embedding|output_layer").search
_EXPERT = re.compile(r"(?:^|\.)experts\.").search
# Parameters of which each tensor-parallel rank has all, and the gradient of a part of a sequence.
_REPLICATED = re.compile(r"norm|router|linear_proj\.bias|linear_fc2\.bias|position_emb").search
_AXES = (
    ("tp", "tensor-parallel"),
    ("dp", "data-parallel"),
    ("cp", "context-parallel"),
    ("ep", "expert-parallel"),
    ("edp", "data-parallel ranks of an expert, that is"),
    ("pp", "pipeline-parallel"),
)


def hint_of(
    divergences: Sequence[TensorDivergence], reference: TraceLayout, candidate: TraceLayout
) -> str | None:
    """Return the likely cause of the first divergence in a sentence; None without a pattern.

    Args:
        divergences: All of them, in the reference's order of execution.
        reference: Layout of the reference; only sizes count.
        candidate: Layout of the candidate.
    """
    if not divergences:
        return None
    first = divergences[0]
    same = [one for one in divergences if (one.step, one.phase) == (first.step, first.phase)]
    if first.step == 0:
        return "the initial weights differ already: they were not loaded, or cut otherwise"
    if first.kind == "not_finite":
        return "values overflow or are divided by zero here"
    match first.phase:
        case "forward":
            return _of_forward(first, same, reference, candidate)
        case "backward":
            return _of_ratio(first, reference, candidate) or _of_ranks(first, candidate)
        case "gradient":
            return _of_gradients(same, reference, candidate)
        case "update":
            return _of_update(same, candidate)


def _of_forward(
    first: TensorDivergence,
    same: Sequence[TensorDivergence],
    reference: TraceLayout,
    candidate: TraceLayout,
) -> str | None:
    if first.tensor == "samples":
        numbers = [one.microbatch for one in same if one.tensor == "samples"]
        return (
            f"samples of {name_ranks(numbers, 'micro-batch')} of the reference are not trained on"
        )
    if not first.module:
        return "the inputs of the model differ: data, labels or position ids"
    if "dropout" in first.module:
        return "ranks draw other dropout masks than the reference: seeds or the random state"
    return _of_ratio(first, reference, candidate) or _of_ranks(first, candidate)


def _of_gradients(
    same: Sequence[TensorDivergence], reference: TraceLayout, candidate: TraceLayout
) -> str | None:
    parameters = [one for one in same if one.parameter is not None]
    names = [one.parameter or "" for one in parameters]
    if not names:
        return (
            "gradients agree and their norm does not: the norm counts parameters that ranks share"
            " twice, or misses some"
        )
    first = parameters[0]
    if candidate.pp[1] > 1 and all(map(_EMBEDDING, names)):
        return (
            "only gradients of the embedding differ: first and last pipeline stage have to add"
            " those of the weight that they share"
        )
    if all(map(_EXPERT, names)):
        ratio = _of_ratio(first, reference, candidate)
        return ratio or "only gradients of experts differ: they are reduced over the wrong ranks"
    if candidate.tp[1] > 1 and all(map(_REPLICATED, names)):
        return (
            "only gradients of parameters that tensor-parallel ranks share differ: with sequence"
            " parallelism each rank has a part, which have to be added"
        )
    ratio = _of_ratio(first, reference, candidate)
    if ratio is None and first.kind == "replicas":
        return f"{name_ranks(first.ranks)} hold the same parameter and were not reduced together"
    return ratio or _of_ranks(first, candidate)


def _of_update(same: Sequence[TensorDivergence], candidate: TraceLayout) -> str:
    first = same[0]
    if first.kind == "replicas":
        return (
            f"gradients agree and {name_ranks(first.ranks)} have other parameters after the step:"
            " the optimizer's parts were not gathered"
        )
    if first.kind == "missing":
        return "no rank of the distributed optimizer has a part of the parameter"
    return "gradients agree and parameters do not: the optimizer, its state or its share of ranks"


def _of_ratio(one: TensorDivergence, reference: TraceLayout, candidate: TraceLayout) -> str | None:
    """Return the hint for a norm that is off by the size of an axis."""
    ratio = one.norm_ratio
    if ratio is None or ratio <= 0:
        return None
    for axis, words in _AXES:
        sizes: tuple[int, int] = getattr(candidate, axis)
        others: tuple[int, int] = getattr(reference, axis)
        size = sizes[1] / others[1]
        if size == 1:
            continue
        if math.isclose(ratio, size, rel_tol=_NEAR):
            return (
                f"the norm is {size:g} times the reference's, the number of {words} ranks: a sum"
                " over them instead of a mean, or one reduction too many"
            )
        if math.isclose(ratio, 1 / size, rel_tol=_NEAR):
            return (
                f"the norm is 1/{size:g} of the reference's, {size:g} being the number of {words}"
                " ranks: a reduction over them is missing, or they are averaged twice"
            )
    return None


def _of_ranks(one: TensorDivergence, candidate: TraceLayout) -> str | None:
    """Return the hint for a difference of some ranks only."""
    sizes = (getattr(candidate, axis)[1] for axis in ("tp", "pp", "dp", "cp"))
    if one.ranks and len(one.ranks) < math.prod(sizes):
        return f"only {name_ranks(one.ranks)} of {math.prod(sizes)} have it: look at their part"
    return None

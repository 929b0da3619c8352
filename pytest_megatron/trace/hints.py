"""The likely cause of the first difference between two traces. Must not import torch."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from pytest_megatron.base.text import name_ranks
from pytest_megatron.trace.equivalence import TensorDivergence
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
    divergences: Sequence[TensorDivergence],
    reference: TraceLayout,
    candidate: TraceLayout,
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
    if first.kind == "not_finite":
        return "values overflow or are divided by zero here"
    if first.kind in {"missing", "extra"} and first.tensor != "samples":
        return "the models, or what ranks compute of them, are not the same"
    match first.phase:
        case "forward":
            found = _forward_hint(first, same, reference, candidate)
        case "backward":
            found = _ratio_hint(first, reference, candidate) or _ranks_hint(first, candidate)
        case "gradient":
            found = _gradient_hint(same, reference, candidate)
        case "update":
            found = _update_hint(first)
        case "initial":
            found = (
                f"{name_ranks(first.ranks)} begin with other values of what they share: seeds,"
                " a checkpoint, or weights that are not broadcast; the reference's replaced them"
            )
    return found


def _forward_hint(
    first: TensorDivergence,
    same: Sequence[TensorDivergence],
    reference: TraceLayout,
    candidate: TraceLayout,
) -> str | None:
    """Return the likely cause of a first difference in a forward pass."""
    if first.tensor == "samples":
        numbers = [one.microbatch for one in same if one.tensor == "samples"]
        return (
            f"samples of {name_ranks(numbers, 'micro-batch')} of the reference are not trained on"
        )
    if not first.module and first.tensor.startswith("input"):
        return "the inputs of the model differ: data, labels or position ids"
    if first.tensor.startswith("input") and first.module:
        return (
            _ratio_hint(first, reference, candidate)
            or "what this module gets is computed between modules, or in one that is not compared"
        )
    return _ratio_hint(first, reference, candidate) or _ranks_hint(first, candidate)


def _gradient_hint(
    same: Sequence[TensorDivergence], reference: TraceLayout, candidate: TraceLayout
) -> str | None:
    """Return the likely cause of gradients that differ."""
    parameters = [one for one in same if one.parameter is not None]
    names = [one.parameter or "" for one in parameters]
    if not names:
        return (
            "gradients agree and their norm does not: it counts parameters that ranks share twice,"
            " misses some, or adds in another order"
        )
    first = parameters[0]
    if candidate.pp[1] > 1 and all(map(_EMBEDDING, names)):
        return (
            "only gradients of the embedding differ: first and last pipeline stage have to add"
            " those of the weight that they share"
        )
    if all(map(_EXPERT, names)):
        ranks = sorted({rank for one in parameters for rank in one.ranks})
        if 0 < len(ranks) < candidate.ep[1]:
            return f"only experts of {name_ranks(ranks)} differ: look at their part"
        ratio = _ratio_hint(first, reference, candidate)
        return ratio or "only gradients of experts differ: they are reduced over the wrong ranks"
    if candidate.tp[1] > 1 and all(map(_REPLICATED, names)):
        return (
            "only gradients of parameters that tensor-parallel ranks share differ: with sequence"
            " parallelism each rank has a part, which have to be added"
        )
    return _ratio_hint(first, reference, candidate) or _ranks_hint(first, candidate)


def _update_hint(first: TensorDivergence) -> str:
    """Return the likely cause of a parameter that differs after a step."""
    if first.is_buffer:
        return "the buffer is updated otherwise, or ranks do not add what each of them counts"
    if first.step == 0:
        return "weights differ before the first step: a seed, a checkpoint, or how they are made"
    if first.kind == "replicas":
        return (
            f"gradients agree and {name_ranks(first.ranks)} have other values after the step: their"
            " optimizers differ, by the learning rate, the clipping or the state, or the parts of"
            " a distributed optimizer were not gathered"
        )
    return (
        "gradients agree, what the optimizer makes of them does not: its settings, state or ranks"
    )


def _ratio_hint(
    one: TensorDivergence, reference: TraceLayout, candidate: TraceLayout
) -> str | None:
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


def _ranks_hint(one: TensorDivergence, candidate: TraceLayout) -> str | None:
    """Return the hint for a difference of some ranks only."""
    if one.kind == "replicas":
        return (
            f"{name_ranks(one.ranks)} hold the same and disagree: a reduction over them is missing"
            " or has the wrong group"
        )
    axes = ("tp", "cp") if one.parameter is None else ("tp", "dp", "cp")
    num_ranks = math.prod(getattr(candidate, axis)[1] for axis in axes)
    if one.ranks and len(one.ranks) < num_ranks and candidate.pp[1] == 1:
        return f"only {name_ranks(one.ranks)} of {num_ranks} differ: look at their part"
    return None

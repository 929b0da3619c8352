"""How many parameters of a model the fullest GPU holds. Pure.

Tensor parallelism splits dense layers, embeddings and shared experts. Routed experts are split over
the ranks of EP, and only ETP splits a single one; without ETP it is TP that does.

Source: Megatron-LM megatron/training/theoretical_memory_usage.py; megatron/training/arguments.py.
"""

from __future__ import annotations

import ast
import math
from dataclasses import dataclass

from pytest_megatron.checks.sizes import ParallelSizes
from pytest_megatron.checks.stages import Stages, stages_of
from pytest_megatron.launch.model_args import ModelArgs


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Parameters on the fullest GPU.

    Attributes:
        dense: All but routed experts.
        experts: Routed experts.
        num_experts: Of a layer, over all ranks; 0 for a dense model.
        has_vocabulary: Whether embeddings are counted.
    """

    dense: float
    experts: float
    num_experts: int
    has_vocabulary: bool


def parameters_of(given: ModelArgs, sizes: ParallelSizes) -> Parameters | None:
    """Return the parameters; None where the arguments do not give them."""
    stages = stages_of(given, sizes)
    names = ("--hidden-size", "--num-attention-heads", "--num-layers")
    hidden, heads, layers = (given.number(name) for name in names)
    if stages is None or not hidden or not heads or not layers:
        return None
    routed = _routed(given, layers)
    if routed is None:
        return None
    held = _most_layers(stages, layers)
    # The fullest stage: as many layers with experts as a stage can have.
    with_experts = min(held, sum(routed))
    extra = given.number("--mtp-num-layers") or 0
    with_experts += extra if routed[-1] else 0
    held += extra
    vocabulary = _vocabulary(given, sizes, hidden)
    gates = 3 if given.is_on("--swiglu") else 2
    width = given.number("--ffn-hidden-size") or _default_width(given, hidden)
    num_experts = given.number("--num-experts") or 0
    expert_width = given.number("--moe-ffn-hidden-size") or width
    shared = given.number("--moe-shared-expert-intermediate-size") or 0
    attention = _attention(given, hidden, heads) / sizes.tp
    mlp = (held - with_experts) * hidden * width * gates / sizes.tp
    mlp += with_experts * (hidden * shared * gates / sizes.tp + hidden * num_experts)
    return Parameters(
        dense=held * (attention + 4 * hidden) + mlp + vocabulary,
        experts=with_experts * num_experts / sizes.ep * hidden * expert_width * gates / sizes.etp,
        num_experts=num_experts,
        has_vocabulary=vocabulary > 0,
    )


def _most_layers(stages: Stages, layers: int) -> int:
    """Return the layers of the fullest stage, at most all."""
    middle = math.ceil(stages.middle / stages.middle_stages) if stages.middle_stages > 0 else 0
    return min(max(middle, *(number for _, number in stages.ends), 1), layers)


def _default_width(given: ModelArgs, hidden: int) -> int:
    return int(4 * hidden * 2 / 3 / 64) * 64 if given.is_on("--swiglu") else 4 * hidden


def _vocabulary(given: ModelArgs, sizes: ParallelSizes, hidden: int) -> float:
    """Return the parameters of embeddings on the fullest GPU."""
    words = given.number("--vocab-size") or 0
    is_tied = not given.is_on("--untie-embeddings-and-output-weights")
    copies = 1 if is_tied or sizes.pp > 1 else 2
    return words * hidden * copies / sizes.tp


def _attention(given: ModelArgs, hidden: int, heads: int) -> float:
    """Return the parameters of one layer's attention, undivided."""
    if given.is_on("--multi-latent-attention"):
        return _latent_attention(given, hidden, heads)
    size = given.number("--kv-channels") or hidden / heads
    is_grouped = given.is_on("--group-query-attention")
    groups = (given.number("--num-query-groups") or 1) if is_grouped else heads
    return 2 * hidden * size * (heads + groups)


def _latent_attention(given: ModelArgs, hidden: int, heads: int) -> float:
    key = given.number("--qk-head-dim") or 128
    position = given.number("--qk-pos-emb-head-dim") or 64
    value = given.number("--v-head-dim") or 128
    low = given.number("--kv-lora-rank") or 32
    query_low = given.number("--q-lora-rank")
    out = heads * (key + position)
    query = query_low * (hidden + out) if query_low else hidden * out
    return query + low * (hidden + heads * (key + value)) + hidden * (position + heads * value)


def _routed(given: ModelArgs, layers: int) -> list[int] | None:
    """Return for each layer whether it has experts; None where that cannot be read."""
    if not given.number("--num-experts"):
        return [0] * layers
    text = given.text("--moe-layer-freq") or "1"
    if text.isdecimal() and int(text):
        return [int(index % int(text) == 0) for index in range(layers)]
    pattern = _pattern(text)
    return pattern if pattern is not None and len(pattern) == layers else None


def _pattern(text: str) -> list[int] | None:
    """Return what `([0]*3+[1]*58)` stands for, without evaluating it; None for anything else."""
    try:
        value = _value(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError):
        return None
    return value if isinstance(value, list) else None


def _value(node: ast.expr) -> list[int] | int:
    match node:
        case ast.Constant(value=int() as number):
            return int(number)
        case ast.List(elts=elements):
            values = [_value(element) for element in elements]
            return [value for value in values if isinstance(value, int)]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            first, second = _value(left), _value(right)
            if isinstance(first, list) and isinstance(second, list):
                return first + second
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            first, second = _value(left), _value(right)
            most = 10_000  # layers; a pattern is text of a file
            if isinstance(first, list) and isinstance(second, int) and second <= most:
                return (first * second)[:most]
            if isinstance(first, int) and isinstance(second, int):
                return min(first * second, most)
        case _:
            pass
    raise ValueError(ast.dump(node))

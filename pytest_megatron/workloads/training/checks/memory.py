"""Estimate of the GPU memory of a training from its arguments. Pure.

Weights, gradients and optimizer states are counted exactly but for biases; activations are rough:
they leave out what attention without flash keeps, buffers of NCCL and of the allocator.

Source: Megatron-LM megatron/training/theoretical_memory_usage.py, for dense layers; experts are
divided by EP and ETP as megatron/core/transformer/moe/experts.py divides them, and not by TP.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from dataclasses import dataclass

from pytest_megatron.gpu.host import gpu_model_of
from pytest_megatron.workloads.recipe.case import CaseMode, ModelArgs, ParallelSizes, sizes_of
from pytest_megatron.workloads.training.checks.layout import (
    CheckedStart,
    Stages,
    product_text,
    stages_of,
)
from pytest_megatron.workloads.training.checks.rules import RuleMatch
from pytest_megatron.workloads.training.plan.plan import FSDP


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Parameters on the fullest GPU.

    Attributes:
        dense: All but routed experts.
        experts: Routed experts.
        num_experts: Experts of a layer, over all ranks; 0 for a dense model.
        has_vocabulary: Whether embeddings are counted.
    """

    dense: float
    experts: float
    num_experts: int
    has_vocabulary: bool


def parameters_of(model_args: ModelArgs, sizes: ParallelSizes) -> Parameters | None:
    """Return the parameters; None where the arguments do not give them."""
    stages = stages_of(model_args, sizes)
    names = ("--hidden-size", "--num-attention-heads", "--num-layers")
    hidden, heads, layers = (model_args.number(name) for name in names)
    if stages is None or not hidden or not heads or not layers:
        return None
    routed = _routed(model_args, layers)
    if routed is None:
        return None
    held = _most_layers(stages, layers)
    # The fullest stage: as many layers with experts as a stage can have.
    with_experts = min(held, sum(routed))
    extra = model_args.number("--mtp-num-layers") or 0
    with_experts += extra if routed[-1] else 0
    held += extra
    vocabulary = _vocabulary(model_args, sizes, hidden)
    gates = 3 if model_args.is_on("--swiglu") else 2
    width = model_args.number("--ffn-hidden-size") or _default_width(model_args, hidden)
    num_experts = model_args.number("--num-experts") or 0
    expert_width = model_args.number("--moe-ffn-hidden-size") or width
    shared = model_args.number("--moe-shared-expert-intermediate-size") or 0
    attention = _attention(model_args, hidden, heads) / sizes.tp
    mlp = (held - with_experts) * hidden * width * gates / sizes.tp
    mlp += with_experts * (hidden * shared * gates / sizes.tp + hidden * num_experts)
    return Parameters(
        dense=held * (attention + 4 * hidden) + mlp + vocabulary + _positions(model_args, hidden),
        experts=with_experts * num_experts / sizes.ep * hidden * expert_width * gates / sizes.etp,
        num_experts=num_experts,
        has_vocabulary=vocabulary > 0,
    )


def _most_layers(stages: Stages, layers: int) -> int:
    """Return the layers of the fullest stage, at most all."""
    middle = math.ceil(stages.middle / stages.middle_stages) if stages.middle_stages > 0 else 0
    return min(max(middle, *(number for _, number in stages.ends), 1), layers)


def _default_width(model_args: ModelArgs, hidden: int) -> int:
    return int(4 * hidden * 2 / 3 / 64) * 64 if model_args.is_on("--swiglu") else 4 * hidden


def _vocabulary(model_args: ModelArgs, sizes: ParallelSizes, hidden: int) -> float:
    """Return the parameters of embeddings on the fullest GPU."""
    words = model_args.number("--vocab-size") or 0
    is_tied = not model_args.is_on("--untie-embeddings-and-output-weights")
    copies = 1 if is_tied or sizes.pp > 1 else 2
    return words * hidden * copies / sizes.tp


def _positions(model_args: ModelArgs, hidden: int) -> float:
    """Return the parameters of learned position embeddings, which no rank shares with another."""
    kind = model_args.text("--position-embedding-type") or "learned_absolute"
    is_learned = kind == "learned_absolute" and not model_args.is_on(
        "--use-rotary-position-embeddings"
    )
    return hidden * (model_args.number("--max-position-embeddings") or 0) * is_learned


def _attention(model_args: ModelArgs, hidden: int, heads: int) -> float:
    """Return the parameters of one layer's attention, undivided."""
    if model_args.is_on("--multi-latent-attention"):
        return _latent_attention(model_args, hidden, heads)
    size = model_args.number("--kv-channels") or hidden / heads
    is_grouped = model_args.is_on("--group-query-attention")
    groups = (model_args.number("--num-query-groups") or 1) if is_grouped else heads
    return 2 * hidden * size * (heads + groups)


def _latent_attention(model_args: ModelArgs, hidden: int, heads: int) -> float:
    """Return the parameters of multi-latent attention in a layer."""
    key = model_args.number("--qk-head-dim") or 128
    position = model_args.number("--qk-pos-emb-head-dim") or 64
    value = model_args.number("--v-head-dim") or 128
    low = model_args.number("--kv-lora-rank") or 32
    query_low = model_args.number("--q-lora-rank")
    out = heads * (key + position)
    query = query_low * (hidden + out) if query_low else hidden * out
    return query + low * (hidden + heads * (key + value)) + hidden * (position + heads * value)


def _routed(model_args: ModelArgs, layers: int) -> list[int] | None:
    """Return for each layer whether it has experts; None where that cannot be read."""
    if not model_args.number("--num-experts"):
        return [0] * layers
    text = model_args.text("--moe-layer-freq") or "1"
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
    """Compute a list or a number that an argument writes as an expression."""
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


GIB = 2**30
# Models with parts that are frozen, or that these arguments say nothing of.
_OTHER_MODELS = (
    *("--model-provider", "--dataset-provider", "--language-model-checkpoint", "--freeze-LM"),
    *("--freeze-ViT", "--encoder-num-layers", "--hybrid-layer-pattern", "--export-kd-teacher-load"),
    *("--hybrid-override-pattern", "--spec", "--moe-use-upcycling", "--lora-rank"),
    *("--export-quant-cfg", "--fp4-param-gather", "--cpu-offloading-num-layers"),
)
_CACHE = "--inference-dynamic-batching-buffer-size-gb"
_UNIFIED = "--inference-dynamic-batching-unified-memory-level"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bytes:
    """Bytes on a GPU for each parameter that it holds."""

    weight: float
    gradient: float
    optimizer: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.weight + self.gradient + self.optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Memory of the fullest GPU, in bytes.

    Attributes:
        dense: For each parameter outside of experts; `expert` likewise.
        rest: Activations, or the cache of an inference.
    """

    parameters: Parameters
    sizes: ParallelSizes
    dense: Bytes
    expert: Bytes
    rest: float
    is_training: bool

    @property
    def weights(self) -> float:
        """Bytes of the weights alone."""
        held = self.parameters
        return held.dense * self.dense.weight + held.experts * self.expert.weight

    @property
    def total(self) -> float:
        """The whole estimate, in bytes."""
        held = self.parameters
        return held.dense * self.dense.total + held.experts * self.expert.total + self.rest

    @property
    def text(self) -> str:
        """The arithmetic of the estimate, as a sum."""
        held = self.parameters
        parts = [_part(held.dense, "parameters", self.dense)]
        if held.experts:
            by = product_text({"EP": self.sizes.ep, "ETP": self.sizes.etp})
            of = f"{held.num_experts} experts / ({by})"
            parts.append(_part(held.experts, f"parameters of {of}", self.expert))
        if self.rest:
            name = "activations (rough)" if self.is_training else "cache"
            parts.append(f"{name} {gib(self.rest)}")
        return f"{' + '.join(parts)} = {gib(self.total)}" + (
            "" if held.has_vocabulary else ", without the embeddings (no --vocab-size)"
        )


def gib(number: float) -> str:
    """Return bytes in GiB."""
    return f"{number / GIB:.1f} GiB"


def _part(number: float, what: str, bytes_per: Bytes) -> str:
    """Describe the memory of some parameters, with its sum."""
    names = {
        "weights": bytes_per.weight,
        "gradients": bytes_per.gradient,
        "optimizer": bytes_per.optimizer,
    }
    split = " + ".join(f"{size:g} {name}" for name, size in names.items() if size)
    times = f"{bytes_per.total:.3g} bytes ({split})"
    return f"{number / 1e9:.2f} G {what} x {times} = {gib(number * bytes_per.total)}"


def estimate_memory(start: CheckedStart) -> Estimate | None:
    """Return what the fullest GPU needs; None for models that the arguments do not describe."""
    given, sizes = start.arguments, sizes_of(start.arguments)
    if sizes is None or not start.has_own_shape or given.has_any(*_OTHER_MODELS):
        return None
    parameters = parameters_of(given, sizes)
    if parameters is None:
        return None
    is_training = start.mode is not CaseMode.INFERENCE
    dense_ranks = max(start.ranks // (sizes.tp * sizes.pp), 1)
    expert_ranks = max(start.ranks // (sizes.etp * sizes.ep * sizes.pp), 1)
    return Estimate(
        parameters=parameters,
        sizes=sizes,
        dense=bytes_of(given, dense_ranks, is_training=is_training),
        expert=bytes_of(given, expert_ranks, is_training=is_training),
        rest=_activations(given, sizes) if is_training else _cache(given),
        is_training=is_training,
    )


def bytes_of(model_args: ModelArgs, ranks: int, *, is_training: bool) -> Bytes:
    """Return the bytes for each parameter.

    Args:
        model_args: The arguments.
        ranks: That hold the same parameters, and share what is sharded.
        is_training: Whether there are gradients and an optimizer.
    """
    is_reduced = model_args.is_on("--bf16", "--fp16")
    weight = 1.0 if model_args.is_on("--fp8-param-gather") else 2.0 if is_reduced else 4.0
    if not is_training:
        return Bytes(weight=weight, gradient=0, optimizer=0)
    is_short = (
        model_args.is_on("--grad-reduce-in-bf16") or model_args.text("--main-grads-dtype") == "bf16"
    )
    is_short |= model_args.is_on("--fp16") and not model_args.is_on(
        "--accumulate-allreduce-grads-in-fp32"
    )
    gradient = 2.0 if is_short else 4.0
    optimizer = _states(model_args) + (4.0 if is_reduced else 0.0)
    if model_args.is_on("--optimizer-cpu-offload"):
        optimizer = 0.0
    is_fsdp = model_args.is_on(*FSDP)
    if model_args.is_on("--use-distributed-optimizer") or is_fsdp:
        optimizer /= ranks
    strategy = model_args.text("--data-parallel-sharding-strategy")
    if model_args.is_on("--use-torch-fsdp2") or (is_fsdp and strategy == "optim_grads_params"):
        weight /= ranks
    if model_args.is_on("--use-torch-fsdp2") or (
        is_fsdp and str(strategy).startswith("optim_grads")
    ):
        gradient /= ranks
    return Bytes(weight=weight, gradient=gradient, optimizer=optimizer)


def _states(model_args: ModelArgs) -> float:
    """Return the bytes of the moments that the optimizer keeps."""
    widths = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0}
    first = widths.get(model_args.text("--exp-avg-dtype") or "fp32", 4.0)
    second = widths.get(model_args.text("--exp-avg-sq-dtype") or "fp32", 4.0)
    optimizer = model_args.text("--optimizer") or "adam"
    return first + (0.0 if optimizer != "adam" else second)


def _cache(model_args: ModelArgs) -> float:
    """Return the bytes of an inference's cache; in unified memory it may be on the host."""
    return 0.0 if model_args.number(_UNIFIED) else (model_args.number(_CACHE) or 0) * GIB


def _activations(model_args: ModelArgs, sizes: ParallelSizes) -> float:
    """Return the bytes of activations of the first stage, which keeps as many layers as there are.

    Source: Korthikanti et al., https://arxiv.org/abs/2205.05198, table 2, with flash attention.
    """
    names = ("--seq-length", "--micro-batch-size", "--hidden-size", "--num-layers")
    length, batch, hidden, layers = (model_args.number(name) or 0 for name in names)
    tokens = length / sizes.cp * batch
    if model_args.text("--recompute-granularity") == "full":
        return tokens * hidden * 2 * layers / (sizes.tp if _is_sequence_split(model_args) else 1)
    split = 34 / sizes.tp if _is_sequence_split(model_args) else 10 + 24 / sizes.tp
    return tokens * hidden * split * layers


def _is_sequence_split(model_args: ModelArgs) -> bool:
    return model_args.is_on("--sequence-parallel")


def check_memory(start: CheckedStart, memory_bytes: int | None = None) -> Iterator[RuleMatch]:
    """Yield a training that does not fit.

    Args:
        start: What is started.
        memory_bytes: Memory of a GPU that it will run on, if one is known; else the platform's.
    """
    model = gpu_model_of(start.platform)
    capacity = memory_bytes or (0 if model is None else model.memory_bytes)
    if not capacity or not start.ranks:
        return
    found = estimate_memory(start)
    if found is None:
        return
    where = start.at("--num-layers")
    values = {"platform": start.platform, "capacity": gib(capacity), "sum": found.text}
    if found.weights > capacity:
        yield RuleMatch("memory-weights", where, weights=gib(found.weights), **values)
    elif found.total > capacity:
        yield RuleMatch("memory-estimate", where, total=gib(found.total), **values)

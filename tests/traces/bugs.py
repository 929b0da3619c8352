"""Bugs of the exam.

Sources: ML is NVIDIA/Megatron-LM on GitHub; TTrace is arXiv 2506.09280.
"""

from __future__ import annotations

import torch
from exam_cases import (
    DROPOUT,
    EP2,
    LLAMA,
    MOE,
    PP2,
    SHARDED,
    SP,
    SWIGLU,
    TP2,
    UNIFORM,
    UNTIED,
    Bug,
    Function,
    after,
    answer,
    core,
    layout,
    skip,
    wrap,
)
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import DistributedOptimizer
from megatron.core.transformer import MegatronModule as Untyped
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler


def dp_sum_for_mean() -> None:
    def unscale(model: DistributedDataParallel, *_: Untyped, **__: Untyped) -> None:
        for buffer in model.buffers:
            for bucket in buffer.buckets:
                bucket.gradient_scaling_factor = 1.0

    after(DistributedDataParallel, "__init__", unscale)


def rope_base_second_stage() -> None:
    def use_default(model: GPTModel, *_: Untyped, **__: Untyped) -> None:
        if parallel_state.get_pipeline_model_parallel_rank() == 1:
            model.rotary_pos_emb.inv_freq *= 0.5

    after(GPTModel, "__init__", use_default)


def aux_loss_times_tp() -> None:
    original = MoEAuxLossAutoScaler.set_loss_scale

    def scaled(scale: torch.Tensor) -> None:
        original(scale * parallel_state.get_tensor_model_parallel_world_size())

    MoEAuxLossAutoScaler.set_loss_scale = staticmethod(scaled)


def last_microbatch_dropped() -> None:
    """The candidate's two ranks have two microbatches each."""
    calls = [0]

    def make(original: Function) -> Function:
        def backward(*args: Untyped, **kwargs: Untyped) -> Untyped:
            calls[0] += 1
            return original(*args, **kwargs) if calls[0] % 2 else [None]

        return backward

    wrap(core("pipeline_parallel.schedules"), "backward_step", make)


def sequence_scatter_swapped() -> None:
    def make(original: Function) -> Function:
        def swapped(tensor: torch.Tensor, *args: Untyped, **kwargs: Untyped) -> Untyped:
            return original(torch.cat(tensor.chunk(2)[::-1]), *args, **kwargs)

        return swapped

    wrap(core("tensor_parallel"), "scatter_to_sequence_parallel_region", make)


def dp_grads_unreduced() -> None:
    skip(core("distributed.param_and_grad_buffer")._ParamAndGradBucketGroup, "finish_grad_sync")


def wrong_expert_offset() -> None:
    def shift(layer: Untyped, *_: Untyped, **__: Untyped) -> None:
        others = 1 - parallel_state.get_expert_model_parallel_rank()
        first = others * layer.num_local_experts
        indices = layer.token_dispatcher.local_expert_indices
        indices[:] = [first + i for i in range(layer.num_local_experts)]

    after(core("transformer.moe.moe_layer").MoELayer, "__init__", shift)


def main_params_stale_one_rank() -> None:
    def make(original: Function) -> Function:
        def copy(*args: Untyped) -> Untyped:
            is_stale = parallel_state.get_tensor_model_parallel_rank() == 1
            return None if is_stale else original(*args)

        return copy

    optimizer = core("optimizer.optimizer").Float16OptimizerWithFloat16Params
    wrap(optimizer, "_copy_main_params_to_model_params", make)


def recompute_other_rng() -> None:
    """The forward pass that is computed again draws other masks."""
    skip(core("tensor_parallel.random"), "_set_all_rng_states")


def stale_grads() -> None:
    calls = [0]

    def make(original: Function) -> Function:
        def zero(*args: Untyped) -> Untyped:
            calls[0] += 1
            if calls[0] == 1:
                return original(*args)
            model = args[0]
            kept = [buffer.grad_data.clone() for buffer in model.buffers]
            original(*args)
            for buffer, values in zip(model.buffers, kept, strict=True):
                buffer.grad_data.copy_(values)
            return None

        return zero

    wrap(DistributedDataParallel, "zero_grad_buffer", make)


def gated_halves_swapped() -> None:
    def swap(model: GPTModel, *_: Untyped, **__: Untyped) -> None:
        if parallel_state.get_tensor_model_parallel_rank() == 0:
            return

        def make(original: Function) -> Function:
            def swapped(*args: Untyped) -> Untyped:
                output, bias = original(*args)
                return torch.cat(output.chunk(2, dim=-1)[::-1], dim=-1), bias

            return swapped

        wrap(model.decoder.layers[1].mlp.linear_fc1, "forward", make)

    after(GPTModel, "__init__", swap)


def tp_over_dp_group() -> None:
    def use_other(model: GPTModel, *_: Untyped, **__: Untyped) -> None:
        group = parallel_state.get_data_parallel_group()
        model.decoder.layers[0].mlp.linear_fc2.tp_group = group

    after(GPTModel, "__init__", use_other)


def column_dgrad_unreduced() -> None:
    def forget(model: GPTModel, *_: Untyped, **__: Untyped) -> None:
        layer = model.decoder.layers[1].mlp.linear_fc1

        def make(original: Function) -> Function:
            def forward(*args: Untyped, **kwargs: Untyped) -> Untyped:
                return original(*args, **{**kwargs, "allreduce_dgrad": False})

            return forward

        wrap(layer, "_forward_impl", make)

    after(GPTModel, "__init__", forget)


def row_parallel_unreduced() -> None:
    def keep_local(model: GPTModel, *_: Untyped, **__: Untyped) -> None:
        model.decoder.layers[1].self_attention.linear_proj.explicit_expert_comm = True

    after(GPTModel, "__init__", keep_local)


def qkv_not_interleaved() -> None:
    def make(original: Function) -> Function:
        def split(*args: Untyped, **kwargs: Untyped) -> Untyped:
            mixed = torch.stack(original(*args, **kwargs), dim=3)  # s, b, heads, 3, width
            size, batch, heads, _, width = mixed.shape
            blocks = mixed.reshape(size, batch, 3, heads, width).unbind(2)
            return tuple(block.contiguous() for block in blocks)

        return split

    wrap(core("transformer.attention").SelfAttention, "get_query_key_value_tensors", make)


def router_grads_unsynced() -> None:
    def unmark(router: Untyped, *_: Untyped, **__: Untyped) -> None:
        router.weight.sequence_parallel = False

    after(core("transformer.moe.router").TopKRouter, "__init__", unmark)


def tied_grads_wrong_shards() -> None:
    """Each stage cuts its shared embedding elsewhere, then the cuts are added."""

    def make(original: Function) -> Function:
        def build(self: Untyped, config: Untyped, ddp: Untyped, module: Untyped) -> None:
            marked = [one for one in module.parameters() if getattr(one, "shared_embedding", False)]
            for one in marked:
                one.shared_embedding = False
            original(self, config, ddp, module)
            for one in marked:
                one.shared_embedding = True

        return build

    wrap(DistributedDataParallel, "__init__", make)


def untied_embedding_not_updated() -> None:
    def make(original: Function) -> Function:
        def step(*args: Untyped) -> Untyped:
            weights = [
                weight
                for chunk in args[0].model_chunks
                for name, weight in chunk.named_parameters()
                if "word_embeddings" in name
            ]
            kept = [weight.detach().clone() for weight in weights]
            result = original(*args)
            if parallel_state.get_data_parallel_rank() == 1:
                for weight, values in zip(weights, kept, strict=True):
                    weight.data.copy_(values)
            return result

        return step

    wrap(DistributedOptimizer, "step_with_ready_grads", make)


def bias_times_tp() -> None:
    def make(original: Function) -> Function:
        def forward(*args: Untyped) -> Untyped:
            output, bias = original(*args)
            return output, bias * parallel_state.get_tensor_model_parallel_world_size()

        return forward

    def change(model: GPTModel, *_: Untyped, **__: Untyped) -> None:
        wrap(model.decoder.layers[0].mlp.linear_fc2, "forward", make)

    after(GPTModel, "__init__", change)


def sequence_dgrad_unsummed() -> None:
    """Each rank keeps its own gradient of its part of the sequence, twice as large."""

    def scatter(
        output: torch.Tensor, source: torch.Tensor, *, group: Untyped, **_: Untyped
    ) -> Untyped:
        rank = torch.distributed.get_rank(group)
        output.copy_(source.chunk(2)[rank] * 2)
        return Done()

    layers = core("tensor_parallel.layers")
    layers.dist_reduce_scatter_func = scatter


class Done:
    """A collective that is over."""

    def wait(self) -> None: ...


_IN_ATTENTION = r"decoder\.layers\.{}\.self_attention(\.core_attention(\.\w+)*)?"

BUGS = (
    Bug(
        name="dp-sum-for-mean",
        text="gradients are summed over data-parallel ranks, not averaged",
        source="TTrace, wrong loss scaling with DP; deepspeedai/DeepSpeed#5259",
        pair=layout("dp-sum-for-mean", 2),
        dtypes=("fp32", "bf16"),
        answers=(answer("gradient", ".*"),),
        plant=dp_sum_for_mean,
    ),
    Bug(
        name="rope-base-second-stage",
        text="the second pipeline stage rotates positions by another base",
        source="made; after huggingface/transformers#24381, a stage that misses what the first has",
        pair=layout("rope-base-second-stage", 2, PP2, common=[LLAMA]),
        dtypes=("fp32",),
        answers=(
            answer("forward", "rotary_pos_emb"),
            answer("forward", r"decoder(\.layers\.1)?"),
            answer("forward", _IN_ATTENTION.format(1)),
        ),
        plant=rope_base_second_stage,
    ),
    Bug(
        name="aux-loss-times-tp",
        text="the load balancing loss counts once for each tensor-parallel rank",
        source="ML#5047",
        pair=layout("aux-loss-times-tp", 2, TP2, SP, common=[MOE, {"--moe-aux-loss-coeff": 0.1}]),
        dtypes=("fp32",),
        answers=(
            answer("backward", r"decoder\.layers\.1\.(mlp(\.router)?|pre_mlp_layernorm)"),
            answer("gradient", r".*\.mlp\.router"),
        ),
        plant=aux_loss_times_tp,
    ),
    Bug(
        name="last-microbatch-dropped",
        text="the backward pass of the last microbatch is left out",
        source="made; ML#1012 reports gradients that come after the reduction",
        pair=layout("last-microbatch-dropped", 2),
        dtypes=("fp32",),
        answers=(answer("backward", ".*"), answer("gradient", ".*")),
        plant=last_microbatch_dropped,
    ),
    Bug(
        name="sequence-scatter-swapped",
        text="tensor-parallel ranks take each other's part of the sequence",
        source="made; ML#7452 lists a scatter over the wrong group (finding 7)",
        pair=layout("sequence-scatter-swapped", 2, TP2, SP),
        dtypes=("fp32", "bf16"),
        answers=(answer("forward", r"embedding(\.embedding_dropout)?"),),
        plant=sequence_scatter_swapped,
    ),
    Bug(
        name="dp-grads-unreduced",
        text="gradients are not reduced over data-parallel ranks",
        source="ML#1685",
        pair=layout("dp-grads-unreduced", 2, common=[LLAMA]),
        dtypes=("fp32",),
        answers=(answer("gradient", ".*"),),
        plant=dp_grads_unreduced,
    ),
    Bug(
        name="wrong-expert-offset",
        text="each rank takes the tokens of the other rank's experts",
        source="made",
        pair=layout("wrong-expert-offset", 2, EP2, common=[MOE]),
        dtypes=("fp32",),
        answers=(answer("forward", r"decoder\.layers\.0\.mlp(\.experts.*)?"),),
        plant=wrong_expert_offset,
    ),
    Bug(
        name="main-params-stale-one-rank",
        text="one rank does not copy its fp32 main parameters to the model",
        source="made; ML#656 reports parameters that part from their copies",
        pair=layout("main-params-stale-one-rank", 2, TP2),
        dtypes=("bf16",),
        answers=(answer("update", ".*"),),
        plant=main_params_stale_one_rank,
    ),
    Bug(
        name="recompute-other-rng",
        text="activations that are computed again have other dropout masks",
        source="allenai/OLMo-core#828, pytorch/pytorch#190758",
        pair=layout("recompute-other-rng", 1, UNIFORM, common=[DROPOUT]),
        dtypes=("fp32",),
        answers=(answer("backward", r"decoder(\.layers\.1.*)?"),),
        plant=recompute_other_rng,
    ),
    Bug(
        name="stale-grads",
        text="the gradients of the step before are added to",
        source="ML#4609",
        pair=layout("stale-grads", 2, SHARDED),
        dtypes=("fp32",),
        answers=(answer("gradient", ".*"),),
        plant=stale_grads,
    ),
    Bug(
        name="gated-halves-swapped",
        text="one tensor-parallel rank takes the gate for the value",
        source="ML#360",
        pair=layout("gated-halves-swapped", 2, TP2, common=[SWIGLU]),
        dtypes=("fp32", "bf16"),
        answers=(answer("forward", r"decoder\.layers\.1\.mlp(\.linear_fc[12])?"),),
        plant=gated_halves_swapped,
    ),
    Bug(
        name="tp-over-dp-group",
        text="a row-parallel layer reduces over the data-parallel group",
        source="TTrace, wrong communication group with TP; ML#7452",
        pair=layout("tp-over-dp-group", 4, TP2),
        dtypes=("fp32",),
        answers=(answer("forward", r"decoder\.layers\.0\.mlp(\.linear_fc2)?"),),
        plant=tp_over_dp_group,
    ),
    Bug(
        name="column-dgrad-unreduced",
        text="a column-parallel layer does not reduce the gradient of its input",
        source="NovaSky-AI/SkyRL#1886",
        pair=layout("column-dgrad-unreduced", 2, TP2),
        dtypes=("fp32", "bf16"),
        answers=(
            answer("backward", r"decoder\.layers\.1\.(mlp(\.linear_fc1)?|pre_mlp_layernorm)"),
        ),
        plant=column_dgrad_unreduced,
    ),
    Bug(
        name="row-parallel-unreduced",
        text="a row-parallel layer does not reduce its output",
        source="made; the reduction that tensor parallelism stands on",
        pair=layout("row-parallel-unreduced", 2, TP2),
        dtypes=("fp32",),
        answers=(answer("forward", r"decoder\.layers\.1\.self_attention(\.linear_proj)?"),),
        plant=row_parallel_unreduced,
    ),
    Bug(
        name="qkv-not-interleaved",
        text="query, key and value are cut as three blocks, not head by head",
        source="vllm-project/vllm#13686; ML#1989 has it under TP",
        pair=layout("qkv-not-interleaved", 2, TP2),
        dtypes=("bf16",),
        answers=(answer("forward", _IN_ATTENTION.format(0)),),
        plant=qkv_not_interleaved,
    ),
    Bug(
        name="router-grads-unsynced",
        text="gradients of router weights are not added up under sequence parallelism",
        source="TTrace, router weights not synchronized with SP",
        pair=layout("router-grads-unsynced", 2, TP2, SP, common=[MOE]),
        dtypes=("fp32", "bf16"),
        answers=(answer("gradient", r"decoder\.layers\.[01]\.mlp\.router"),),
        plant=router_grads_unsynced,
    ),
    Bug(
        name="tied-grads-wrong-shards",
        text="tied embeddings are sharded differently on the stages that add their gradients",
        source="ML#844; TTrace, wrong gradients of tied embeddings with ZeRO",
        pair=layout("tied-grads-wrong-shards", 4, PP2, SHARDED),
        dtypes=("fp32",),
        answers=(answer("gradient", r"embedding\.word_embeddings|output_layer"),),
        plant=tied_grads_wrong_shards,
    ),
    Bug(
        name="untied-embedding-not-updated",
        text="one data-parallel rank does not get the updated embedding",
        source="TTrace, untied embedding not updated with ZeRO; ML#663",
        pair=layout("untied-embedding-not-updated", 2, SHARDED, common=[UNTIED]),
        dtypes=("fp32",),
        answers=(answer("update", r"embedding\.word_embeddings"),),
        plant=untied_embedding_not_updated,
    ),
    Bug(
        name="bias-times-tp",
        text="the bias of a row-parallel layer counts once for each tensor-parallel rank",
        source="made",
        pair=layout("bias-times-tp", 2, TP2),
        dtypes=("fp32",),
        answers=(
            answer("backward", r"decoder\.layers\.0\.mlp\.linear_fc2"),
            answer("gradient", r"decoder\.layers\.0\.mlp\.linear_fc2", "bias"),
            answer("forward", r"decoder\.layers\.0\.mlp(\.linear_fc2)?"),
        ),
        plant=bias_times_tp,
    ),
    Bug(
        name="sequence-dgrad-unsummed",
        text="gradients of gathered sequences are cut but not added up",
        source="ML#1446 and TTrace have its like for weights",
        pair=layout("sequence-dgrad-unsummed", 2, TP2, SP),
        dtypes=("fp32",),
        answers=(answer("backward", r"output_layer|decoder(\.final_layernorm)?"),),
        plant=sequence_dgrad_unsummed,
    ),
)

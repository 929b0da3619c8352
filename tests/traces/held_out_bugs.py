"""Bugs of the exam that are kept apart: whoever works on the comparison must not read this file.

Sources: ML is NVIDIA/Megatron-LM on GitHub; TTrace is arXiv 2506.09280.
"""

from __future__ import annotations

import gpt_model
import gpt_training
import torch
from exam_cases import (
    ALL_TO_ALL,
    DROPOUT,
    EP2,
    FEELS_SCALE,
    FOUR_LAYERS,
    LLAMA,
    MOE,
    PP2,
    SELECTIVE,
    SHARDED,
    SP,
    TP2,
    UNIFORM,
    VIRTUAL,
    Bug,
    Function,
    after,
    answer,
    core,
    layout,
    skip,
    wrap,
)
from gpt_arguments import Arguments
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import VocabParallelEmbedding
from megatron.core.transformer import MegatronModule as Untyped
from megatron.core.transformer import TransformerLayer


def shard_remainder_skipped() -> None:
    """The last data-parallel rank does not update its last shard."""

    def make(original: Function) -> Function:
        def step(*args: Untyped) -> Untyped:
            optimizer = args[0]
            if not isinstance(optimizer, DistributedOptimizer):
                return original(*args)
            size = parallel_state.get_data_parallel_world_size()
            if parallel_state.get_data_parallel_rank() != size - 1:
                return original(*args)
            shard = optimizer.optimizer.param_groups[0]["params"][-1]
            kept = shard.detach().clone()
            result = original(*args)
            shard.data.copy_(kept)
            optimizer._copy_main_params_to_model_params()
            return result

        return step

    wrap(core("optimizer.optimizer").MixedPrecisionOptimizer, "step_with_ready_grads", make)


def decay_on_norms() -> None:
    def make(original: Function) -> Function:
        def build(*args: Untyped, **kwargs: Untyped) -> Untyped:
            optimizer = original(*args, **kwargs)
            for group in optimizer.param_groups:
                group["wd_mult"] = 1.0
            return optimizer

        return build

    wrap(gpt_model, "get_megatron_optimizer", make)


def stale_microbatch_input() -> None:
    """The second stage computes with the activations of the microbatch before."""

    def make(original: Function) -> Function:
        kept: list[torch.Tensor] = []

        def set_input(*args: Untyped) -> Untyped:
            model, tensors = args
            tensor = tensors[0] if isinstance(tensors, list) else tensors
            if tensor is None:
                return original(model, tensors)
            mixed = tensor + (kept[0] - tensor).detach() if kept else tensor
            kept[:] = [tensor.detach().clone()]
            return original(model, [mixed])

        return set_input

    wrap(GPTModel, "set_input_tensor", make)


def same_rng_over_tp() -> None:
    def make(original: Function) -> Function:
        def seed(*args: Untyped, **kwargs: Untyped) -> Untyped:
            return original(*args, **{**kwargs, "tp_rank": 0})

        return seed

    wrap(core("tensor_parallel"), "model_parallel_cuda_manual_seed", make)


def clip_norm_counts_replicas() -> None:
    wrap(
        core("tensor_parallel"),
        "param_is_not_tensor_parallel_duplicate",
        lambda _: lambda *_args, **_kwargs: True,
    )


def shared_grad_dropped() -> None:
    def make(original: Function) -> Function:
        def weight(*args: Untyped) -> Untyped:
            return original(*args).detach()

        return weight

    wrap(GPTModel, "shared_embedding_or_output_weight", make)


def experts_restored_wrong() -> None:
    def confuse(dispatcher: Untyped, *_: Untyped, **__: Untyped) -> None:
        dispatcher.restore_output_by_local_experts = dispatcher.sort_input_by_local_experts

    dispatchers = core("transformer.moe.token_dispatcher")
    after(dispatchers.MoEAlltoAllTokenDispatcher, "__init__", confuse)


def vocab_mask_off_by_one() -> None:
    def shrink(embedding: VocabParallelEmbedding, *_: Untyped, **__: Untyped) -> None:
        embedding.vocab_end_index -= 1

    after(VocabParallelEmbedding, "__init__", shrink)


def wrong_offset_virtual_stage() -> None:
    """The offset forgets the virtual stage: chunks of a rank get the numbers of its first."""
    _with_offset(lambda original, args, kwargs: original(*args, **{**kwargs, "vp_stage": 0}))


def wrong_stage_division() -> None:
    """The second stage starts one layer too early."""

    def shift(original: Function, args: tuple[Untyped, ...], kwargs: dict[str, Untyped]) -> Untyped:
        return max(0, original(*args, **kwargs) - 1)

    _with_offset(shift)


def _with_offset(change: Untyped) -> None:
    """Change the number of a stage's first layer wherever megatron-core asks for it."""
    original = core("transformer.transformer_layer").get_transformer_layer_offset

    def offset(config: Untyped, vp_stage: Untyped = None, pp_rank: Untyped = None) -> Untyped:
        return change(original, (config,), {"vp_stage": vp_stage, "pp_rank": pp_rank})

    for module in ("transformer.transformer_layer", "transformer.transformer_block"):
        core(module).get_transformer_layer_offset = offset


def clip_skips_replicas() -> None:
    """Ranks other than the first do not clip what all tensor-parallel ranks have."""
    from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate as counts

    def make(original: Function) -> Function:
        def clip(parameters: list[torch.Tensor], *args: Untyped, **kwargs: Untyped) -> Untyped:
            return original([one for one in parameters if counts(one)], *args, **kwargs)

        return clip

    wrap(core("optimizer.optimizer"), "clip_grad_by_total_norm_fp32", make)


def expert_grads_over_dense_group() -> None:
    def make(original: Function) -> Function:
        def build(self: Untyped, config: Untyped, ddp: Untyped, module: Untyped) -> None:
            experts = [one for one in module.parameters() if not getattr(one, "allreduce", True)]
            for one in experts:
                one.allreduce = True
            original(self, config, ddp, module)
            for one in experts:
                one.allreduce = False

        return build

    wrap(DistributedDataParallel, "__init__", make)


def sp_norm_grads_unreduced() -> None:
    skip(core("distributed.finalize_model_grads"), "_allreduce_non_tensor_model_parallel_grads")


def recompute_first_input() -> None:
    """Each layer of a unit that is computed again gets the input of the unit."""
    first: list[torch.Tensor] = []

    def make(original: Function) -> Function:
        def forward(*args: Untyped, **kwargs: Untyped) -> Untyped:
            if args[0].layer_number == 1:
                first[:] = [kwargs["hidden_states"]]
            return original(*args, **{**kwargs, "hidden_states": first[0]})

        return forward

    wrap(TransformerLayer, "forward", make)


def expert_grads_unscaled() -> None:
    def unscale(model: DistributedDataParallel, *_: Untyped, **__: Untyped) -> None:
        for buffer in model.expert_parallel_buffers:
            for bucket in buffer.buckets:
                bucket.gradient_scaling_factor = 1.0

    after(DistributedDataParallel, "__init__", unscale)


def recompute_rolled_input() -> None:
    def make(original: Function) -> Function:
        def detach(inputs: tuple[torch.Tensor, ...]) -> Untyped:
            return original((inputs[0].roll(1, 0), *inputs[1:]))

        return detach

    wrap(core("tensor_parallel.random"), "detach_variable", make)


def loss_over_microbatches_twice() -> None:
    def make(original: Function) -> Function:
        def loss_of(arguments: Arguments, *args: Untyped) -> Untyped:
            loss, reported = original(arguments, *args)
            return loss / (arguments.global_batch_size // arguments.micro_batch_size), reported

        return loss_of

    wrap(gpt_training, "loss_of", make)


def loss_of_gathered_logits() -> None:
    def gather(model: GPTModel, *_: Untyped, **__: Untyped) -> None:
        model.output_layer.gather_output = True

    after(GPTModel, "__init__", gather)


def virtual_chunk_without_optimizer() -> None:
    def make(original: Function) -> Function:
        def build(config: Untyped, chunks: list[Untyped], **kwargs: Untyped) -> Untyped:
            return original(config, chunks[:1], **kwargs)

        return build

    wrap(gpt_model, "get_megatron_optimizer", make)


def tied_embedding_unreduced() -> None:
    skip(core("distributed.finalize_model_grads"), "_allreduce_word_embedding_grads")


_ATTENTION = r"decoder\.layers\.{}\.self_attention(\.core_attention(\.\w+)*)?"

BUGS = (
    Bug(
        name="shard-remainder-skipped",
        text="the last shard of the distributed optimizer is not updated",
        source="made; deepspeedai/DeepSpeed#6974 concerns the last ranks' remainder",
        pair=layout("shard-remainder-skipped", 2, SHARDED),
        dtypes=("fp32", "bf16"),
        answers=(answer("update", r"embedding\.word_embeddings"),),
        plant=shard_remainder_skipped,
    ),
    Bug(
        name="decay-on-norms",
        text="weights of norms decay too, in the candidate only",
        source="bigscience-workshop/Megatron-DeepSpeed#262, ServiceNow/Fast-LLM#542",
        pair=layout("decay-on-norms", 2, TP2, common=[{"--weight-decay": 0.1}]),
        dtypes=("fp32",),
        answers=(answer("update", r".*layernorm", "weight"),),
        plant=decay_on_norms,
    ),
    Bug(
        name="stale-microbatch-input",
        text="the second stage computes with the activations of the microbatch before",
        source="made",
        pair=layout("stale-microbatch-input", 2, PP2),
        dtypes=("fp32",),
        answers=(answer("forward", r"decoder(\.layers\.1(\.input_layernorm)?)?"),),
        plant=stale_microbatch_input,
    ),
    Bug(
        name="same-rng-over-tp",
        text="tensor-parallel ranks draw the same dropout masks for their heads",
        source="made; ML#655 asks for it",
        pair=layout(
            "same-rng-over-tp",
            2,
            UNIFORM,
            common=[TP2, DROPOUT],
            reference_ranks=2,
        ),
        dtypes=("fp32",),
        answers=(answer("forward", _ATTENTION.format(0)),),
        plant=same_rng_over_tp,
    ),
    Bug(
        name="clip-norm-counts-replicas",
        text="the norm for clipping counts replicated weights once per tensor-parallel rank",
        source="ROCm/TransformerEngine#715, NVIDIA-NeMo/RL#3788",
        pair=layout("clip-norm-counts-replicas", 2, TP2, common=[FEELS_SCALE]),
        dtypes=("fp32",),
        answers=(answer("update", ".*"),),
        plant=clip_norm_counts_replicas,
    ),
    Bug(
        name="shared-grad-dropped",
        text="the output layer's part of the tied embedding's gradient is lost",
        source="made; ML#656 concerns tied weights that part",
        pair=layout("shared-grad-dropped", 2, TP2),
        dtypes=("fp32",),
        answers=(
            answer("gradient", r"embedding\.word_embeddings|output_layer"),
            answer("backward", r"output_layer|embedding\.word_embeddings", "weight"),
        ),
        plant=shared_grad_dropped,
    ),
    Bug(
        name="experts-restored-wrong",
        text="outputs of experts go back to other tokens",
        source="made",
        pair=layout(
            "experts-restored-wrong", 2, EP2, ALL_TO_ALL, common=[MOE, {"--num-experts": 6}]
        ),
        dtypes=("fp32",),
        answers=(answer("forward", r"decoder\.layers\.0(\.mlp(\.experts)?)?"),),
        plant=experts_restored_wrong,
    ),
    Bug(
        name="vocab-mask-off-by-one",
        text="each tensor-parallel rank masks its last token",
        source="TTrace, wrong embedding mask with TP",
        pair=layout("vocab-mask-off-by-one", 2, TP2),
        dtypes=("fp32", "bf16"),
        answers=(answer("forward", r"embedding\.word_embeddings"),),
        plant=vocab_mask_off_by_one,
    ),
    Bug(
        name="wrong-offset-virtual-stage",
        text="layers of the second virtual stage have the numbers of the first",
        source="ML#1584",
        pair=layout("wrong-offset-virtual-stage", 2, PP2, VIRTUAL, common=[FOUR_LAYERS]),
        dtypes=("fp32",),
        answers=(answer("forward", r"decoder\.layers\.[0-3].*"),),
        plant=wrong_offset_virtual_stage,
    ),
    Bug(
        name="clip-skips-replicas",
        text="ranks other than the first do not clip replicated weights",
        source="deepspeedai/DeepSpeed#1801, of BLOOM-176B; TrainCheck's first case",
        pair=layout("clip-skips-replicas", 2, TP2, common=[FEELS_SCALE, {"--clip-grad": 0.5}]),
        dtypes=("fp32", "bf16"),
        answers=(
            answer("update", r".*(layernorm|position_embeddings)"),
            answer("update", r".*(linear_proj|linear_fc2)", "bias"),
        ),
        plant=clip_skips_replicas,
    ),
    Bug(
        name="expert-grads-over-dense-group",
        text="gradients of different experts are mixed over the dense data-parallel group",
        source="ML#5916",
        pair=layout("expert-grads-over-dense-group", 2, EP2, common=[MOE]),
        dtypes=("fp32",),
        answers=(answer("gradient", r"decoder\.layers\.[01]\.mlp\.experts.*"),),
        plant=expert_grads_over_dense_group,
    ),
    Bug(
        name="sp-norm-grads-unreduced",
        text="gradients of norms are not added up under sequence parallelism",
        source="ML#1446; TTrace, layernorm weights not synchronized with SP",
        pair=layout("sp-norm-grads-unreduced", 2, TP2, SP),
        dtypes=("fp32", "bf16"),
        answers=(
            answer("gradient", r".*layernorm"),
            answer("gradient", r".*(linear_proj|linear_fc2)", "bias"),
        ),
        plant=sp_norm_grads_unreduced,
    ),
    Bug(
        name="wrong-stage-division",
        text="the second stage starts one layer too early",
        source="TTrace, wrong stage division with PP; huggingface/transformers#24381",
        pair=layout("wrong-stage-division", 2, PP2, common=[FOUR_LAYERS]),
        dtypes=("fp32",),
        answers=(answer("forward", r"decoder\.layers\.[123].*"),),
        plant=wrong_stage_division,
    ),
    Bug(
        name="recompute-first-input",
        text="all layers of a recomputed unit get the unit's input",
        source="ML#290; TTrace, wrong input with activation recomputation",
        pair=layout("recompute-first-input", 1, UNIFORM, {"--recompute-num-layers": 2}),
        dtypes=("fp32",),
        answers=(answer("forward", r"decoder(\.layers\.1(\.input_layernorm)?)?"),),
        plant=recompute_first_input,
    ),
    Bug(
        name="expert-grads-unscaled",
        text="gradients of experts are larger by the number of expert-parallel ranks",
        source="pytorch/pytorch#160285, deepspeedai/DeepSpeed#5259",
        pair=layout("expert-grads-unscaled", 2, EP2, ALL_TO_ALL, common=[MOE]),
        dtypes=("fp32", "bf16"),
        answers=(answer("gradient", r"decoder\.layers\.[01]\.mlp\.experts.*"),),
        plant=expert_grads_unscaled,
    ),
    Bug(
        name="recompute-rolled-input",
        text="attention is computed again with the queries of other positions",
        source="TTrace, wrong input with activation recomputation",
        pair=layout("recompute-rolled-input", 2, TP2, SELECTIVE),
        dtypes=("fp32",),
        answers=(
            answer(
                "backward", r"decoder\.layers\.1\.self_attention(\.(core_attention.*|linear_qkv))?"
            ),
        ),
        plant=recompute_rolled_input,
    ),
    Bug(
        name="loss-over-microbatches-twice",
        text="the loss is divided by the number of microbatches twice",
        source="huggingface/transformers#35203, verl-project/verl#3332",
        pair=layout(
            "loss-over-microbatches-twice",
            1,
            {"--micro-batch-size": 2},
            reference=[{"--micro-batch-size": 8}],
        ),
        dtypes=("fp32",),
        answers=(answer("backward", r"output_layer|"),),
        plant=loss_over_microbatches_twice,
    ),
    Bug(
        name="loss-of-gathered-logits",
        text="the loss of cut logits is taken of gathered ones",
        source="ML#7452, finding 2",
        pair=layout("loss-of-gathered-logits", 2, TP2, common=[LLAMA]),
        dtypes=("fp32",),
        answers=(answer("forward", r"output_layer|"),),
        plant=loss_of_gathered_logits,
    ),
    Bug(
        name="virtual-chunk-without-optimizer",
        text="the optimizer has the weights of the first virtual stage only",
        source="made",
        pair=layout(
            "virtual-chunk-without-optimizer",
            2,
            PP2,
            VIRTUAL,
            common=[FOUR_LAYERS, {"--clip-grad": 0.0}],
        ),
        dtypes=("fp32",),
        answers=(
            answer("update", r"decoder\.layers\.[23].*|decoder\.final_layernorm|output_layer"),
            answer("update", r"embedding\.word_embeddings"),  # its copy on the last stage
        ),
        plant=virtual_chunk_without_optimizer,
    ),
    Bug(
        name="tied-embedding-unreduced",
        text="gradients of tied embeddings are not added up over the first and last stage",
        source="ML#656, ML#6500",
        pair=layout("tied-embedding-unreduced", 2, PP2),
        dtypes=("fp32", "bf16"),
        answers=(answer("gradient", r"embedding\.word_embeddings|output_layer"),),
        plant=tied_embedding_unreduced,
    ),
)

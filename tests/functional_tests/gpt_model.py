"""Build what is trained: the GPT of this rank, its gradient buffers, its optimizer and schedule.

The initial weights do not depend on the parallel layout: each whole weight is drawn on the CPU
from a generator that is seeded by the run's seed and the weight's name in a checkpoint, and a rank
takes its part of it. So the losses of all layouts, and of CPU and GPU, can be compared.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from gpt_arguments import Arguments
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Everything that a training step changes, and nothing else.

    Attributes:
        bare: The GPT inside `model`, whose weights a checkpoint holds.
        chunks: The parts of the GPT on this rank, in their wrappers for mixed precision and
            gradient buffers: one, or one for each virtual pipeline stage.
    """

    config: TransformerConfig
    bare: GPTModel
    chunks: list[DistributedDataParallel]
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler

    @property
    def model(self) -> DistributedDataParallel:
        """The first chunk, and the only one without virtual pipeline stages."""
        return self.chunks[0]


def build(arguments: Arguments, device: torch.device) -> Trained:
    """Build model, optimizer and schedule on `device`, with the weights that `seed` stands for.

    Raises:
        RuntimeError: Transformer Engine is asked for and not installed.
    """
    config = transformer_config(arguments)
    num_stages = arguments.virtual_pipeline_model_parallel_size
    stages = [None] if num_stages is None else list(range(num_stages))
    bares = [build_gpt(arguments, config, stage).to(device) for stage in stages]
    chunks = [wrap(arguments, config, bare) for bare in bares]
    optimizer = build_optimizer(arguments, chunks)
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    if arguments.overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in chunks]
        config.no_sync_func = no_sync[0] if len(no_sync) == 1 else no_sync
    return Trained(
        config=config,
        bare=bares[0],
        chunks=chunks,
        optimizer=optimizer,
        scheduler=build_scheduler(arguments, optimizer),
    )


def wrap(
    arguments: Arguments, config: TransformerConfig, bare: GPTModel
) -> DistributedDataParallel:
    """Draw the weights of a chunk and put it into its wrappers."""
    with torch.no_grad():
        draw_weights(bare, arguments)
    wrapped: MegatronModule = Float16Module(config, bare) if arguments.bf16 else bare
    return DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=arguments.overlap_grad_reduce,
            overlap_param_gather=arguments.overlap_param_gather,
            use_distributed_optimizer=arguments.use_distributed_optimizer,
            check_for_nan_in_grad=arguments.check_for_nan_in_loss_and_grad,
        ),
        wrapped,
    )


def transformer_config(arguments: Arguments) -> TransformerConfig:
    """Say in megatron-core's words what the model is; every fused kernel is off."""
    dtype = torch.bfloat16 if arguments.bf16 else torch.float32
    return TransformerConfig(
        num_layers=arguments.num_layers,
        hidden_size=arguments.hidden_size,
        ffn_hidden_size=arguments.ffn_hidden_size,
        num_attention_heads=arguments.num_attention_heads,
        num_query_groups=arguments.num_query_groups,
        gated_linear_unit=arguments.swiglu,
        activation_func=torch.nn.functional.silu if arguments.swiglu else torch.nn.functional.gelu,
        normalization=arguments.normalization,
        add_bias_linear=not arguments.disable_bias_linear,
        hidden_dropout=arguments.hidden_dropout,
        attention_dropout=arguments.attention_dropout,
        tensor_model_parallel_size=arguments.tensor_model_parallel_size,
        pipeline_model_parallel_size=arguments.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=arguments.virtual_pipeline_model_parallel_size,
        expert_model_parallel_size=arguments.expert_model_parallel_size,
        # Two stages send to each other both ways at once, which one batch would mix up.
        overlap_p2p_comm=arguments.num_layers_per_virtual_pipeline_stage is not None,
        batch_p2p_comm=arguments.num_layers_per_virtual_pipeline_stage is None,
        recompute_granularity=arguments.recompute_granularity,
        recompute_method=arguments.recompute_method,
        recompute_num_layers=arguments.recompute_num_layers,
        expert_tensor_parallel_size=arguments.expert_tensor_parallel_size,
        sequence_parallel=arguments.sequence_parallel,
        num_moe_experts=arguments.num_experts,
        moe_router_topk=arguments.moe_router_topk,
        moe_aux_loss_coeff=arguments.moe_aux_loss_coeff,
        moe_token_dispatcher_type=arguments.moe_token_dispatcher_type,
        bf16=arguments.bf16,
        fp8=arguments.fp8_format,
        attention_backend=AttnBackend[arguments.attention_backend],
        params_dtype=dtype,
        pipeline_dtype=dtype,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        deterministic_mode=arguments.deterministic_mode,
    )


class SequenceParallelLayerNorm(torch.nn.LayerNorm):
    """torch's norm of a part of each sequence; megatron-core has it from Apex alone."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps)
        mark_as_partial(self, config)


class SequenceParallelRMSNorm(torch.nn.RMSNorm):
    """The same without mean and bias."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps)
        mark_as_partial(self, config)


def mark_as_partial(norm: torch.nn.Module, config: TransformerConfig) -> None:
    """Let `finalize_model_grads` add up the gradients of `norm` over tensor-parallel ranks."""
    for weight in norm.parameters():
        vars(weight)["sequence_parallel"] = config.sequence_parallel


def sequence_parallel_spec(layer: ModuleSpec, config: TransformerConfig, num_layers: int) -> object:
    """Describe a block of local layers whose norms know of sequence parallelism."""
    parts = layer.submodules
    assert isinstance(parts, TransformerLayerSubmodules)
    is_rms = config.normalization == "RMSNorm"
    norm = SequenceParallelRMSNorm if is_rms else SequenceParallelLayerNorm
    parts.input_layernorm = parts.pre_mlp_layernorm = norm
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=norm)


def layer_spec(arguments: Arguments) -> ModuleSpec:
    """Choose the modules that a layer is made of.

    Raises:
        RuntimeError: Transformer Engine is asked for and not installed.
    """
    if arguments.transformer_impl == "local":
        return get_gpt_layer_local_spec(
            num_experts=arguments.num_experts, normalization=arguments.normalization
        )
    if importlib.util.find_spec("transformer_engine") is None:
        raise RuntimeError(
            "--transformer-impl: transformer_engine is not installed here; install"
            " 'pytest-megatron[te]' on a machine with CUDA, or use local"
        )
    return get_gpt_layer_with_transformer_engine_spec(num_experts=arguments.num_experts)


def build_gpt(
    arguments: Arguments, config: TransformerConfig, stage: int | None = None
) -> GPTModel:
    """Build this (virtual) pipeline stage's part of the GPT, with weights yet to be drawn."""
    if not hasattr(moe_utils, "te_general_gemm"):
        # Without Transformer Engine megatron-core 0.16.1 leaves this name undefined, and its
        # router compares it with None.
        moe_utils.te_general_gemm = None
    spec: object = layer_spec(arguments)
    if arguments.sequence_parallel and arguments.transformer_impl == "local":
        num_layers = get_num_layers_to_build(config, stage)
        spec = sequence_parallel_spec(layer_spec(arguments), config, num_layers)
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=arguments.vocab_size,
        max_sequence_length=arguments.max_position_embeddings or arguments.seq_length,
        position_embedding_type=arguments.position_embedding_type,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        vp_stage=stage,
        share_embeddings_and_output_weights=not arguments.untie_embeddings_and_output_weights,
    )


def draw_weights(model: GPTModel, arguments: Arguments) -> None:
    """Set every weight that this rank holds to its part of the whole weight."""
    for shard in _shards(model.sharded_state_dict()):
        assert shard.data is not None
        skip = shard.prepend_axis_num  # layer or expert number: part of the name, not of the shape
        name = f"{shard.key}/{shard.global_offset[:skip]}"
        whole = draw_whole_weight(name, shard.global_shape[skip:], arguments)
        part = tuple(
            slice(start, start + length)
            for start, length in zip(shard.global_offset[skip:], shard.local_shape, strict=True)
        )
        shard.data.copy_(whole[part])


def draw_whole_weight(name: str, shape: tuple[int, ...], arguments: Arguments) -> torch.Tensor:
    """Draw one weight as it is without parallelism: a function of seed, name and shape alone."""
    module, kind = name.split("/", maxsplit=1)[0].split(".")[-2:]
    if kind.endswith("bias"):
        return torch.zeros(shape)
    if "norm" in module or "norm" in kind:  # Transformer Engine fuses `layer_norm_weight` in
        return torch.ones(shape)
    std = arguments.init_method_std
    if module in ("linear_proj", "linear_fc2"):  # their outputs are summed over all layers
        std /= math.sqrt(2 * arguments.num_layers)
    digest = hashlib.sha256(f"{arguments.seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return torch.randn(shape, generator=generator) * std


def _shards(state: object) -> Iterator[ShardedTensor]:
    """Walk over all tensors of a sharded state dict."""
    if isinstance(state, ShardedTensorFactory):
        state = state.build()
    if isinstance(state, ShardedTensor):
        yield state
    elif isinstance(state, Mapping):
        for value in state.values():
            yield from _shards(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from _shards(value)


def build_optimizer(
    arguments: Arguments, chunks: list[DistributedDataParallel]
) -> MegatronOptimizer:
    """Build megatron-core's Adam, sharded over data-parallel ranks if asked for."""
    config = OptimizerConfig(
        optimizer="adam",
        lr=arguments.lr,
        min_lr=arguments.min_lr,
        weight_decay=arguments.weight_decay,
        adam_beta1=arguments.adam_beta1,
        adam_beta2=arguments.adam_beta2,
        clip_grad=arguments.clip_grad,
        bf16=arguments.bf16,
        params_dtype=torch.bfloat16 if arguments.bf16 else torch.float32,
        use_distributed_optimizer=arguments.use_distributed_optimizer,
        overlap_param_gather=arguments.overlap_param_gather,
        log_num_zeros_in_grad=arguments.log_num_zeros_in_grad,
    )
    return get_megatron_optimizer(config, chunks, use_gloo_process_groups=False)


def build_scheduler(arguments: Arguments, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """Build the schedule of learning rate and weight decay, counted in samples."""
    batch = arguments.global_batch_size
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=arguments.lr,
        min_lr=arguments.min_lr,
        lr_warmup_steps=arguments.lr_warmup_iters * batch,
        lr_decay_steps=arguments.train_iters * batch,
        lr_decay_style=arguments.lr_decay_style,
        start_wd=arguments.weight_decay,
        end_wd=arguments.weight_decay,
        wd_incr_steps=arguments.train_iters * batch,
        wd_incr_style="constant",
    )

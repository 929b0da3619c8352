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


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Everything that a training step changes, and nothing else.

    Attributes:
        bare: The GPT inside `model`, whose weights a checkpoint holds.
        model: The same, in its wrapper for mixed precision and its gradient buffers.
    """

    config: TransformerConfig
    bare: GPTModel
    model: DistributedDataParallel
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler


def build(arguments: Arguments, device: torch.device) -> Trained:
    """Build model, optimizer and schedule on `device`, with the weights that `seed` stands for.

    Raises:
        RuntimeError: Transformer Engine is asked for and not installed.
    """
    config = transformer_config(arguments)
    bare = build_gpt(arguments, config).to(device)
    with torch.no_grad():
        draw_weights(bare, arguments)
    wrapped: MegatronModule = Float16Module(config, bare) if arguments.bf16 else bare
    model = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=arguments.overlap_grad_reduce,
            use_distributed_optimizer=arguments.use_distributed_optimizer,
            check_for_nan_in_grad=arguments.check_for_nan_in_loss_and_grad,
        ),
        wrapped,
    )
    optimizer = build_optimizer(arguments, model)
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    config.no_sync_func = model.no_sync if arguments.overlap_grad_reduce else None
    return Trained(
        config=config,
        bare=bare,
        model=model,
        optimizer=optimizer,
        scheduler=build_scheduler(arguments, optimizer),
    )


def transformer_config(arguments: Arguments) -> TransformerConfig:
    """Say in megatron-core's words what the model is; every fused kernel is off."""
    dtype = torch.bfloat16 if arguments.bf16 else torch.float32
    return TransformerConfig(
        num_layers=arguments.num_layers,
        hidden_size=arguments.hidden_size,
        ffn_hidden_size=arguments.ffn_hidden_size,
        num_attention_heads=arguments.num_attention_heads,
        normalization=arguments.normalization,
        add_bias_linear=not arguments.disable_bias_linear,
        hidden_dropout=arguments.hidden_dropout,
        attention_dropout=arguments.attention_dropout,
        tensor_model_parallel_size=arguments.tensor_model_parallel_size,
        pipeline_model_parallel_size=arguments.pipeline_model_parallel_size,
        expert_model_parallel_size=arguments.expert_model_parallel_size,
        sequence_parallel=arguments.sequence_parallel,
        num_moe_experts=arguments.num_experts,
        moe_router_topk=arguments.moe_router_topk,
        moe_aux_loss_coeff=arguments.moe_aux_loss_coeff,
        moe_token_dispatcher_type=arguments.moe_token_dispatcher_type,
        bf16=arguments.bf16,
        fp8=arguments.fp8_format,
        fp8_recipe=arguments.fp8_recipe,
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


def build_gpt(arguments: Arguments, config: TransformerConfig) -> GPTModel:
    """Build this pipeline stage's part of the GPT; its weights are not yet those of the seed."""
    if not hasattr(moe_utils, "te_general_gemm"):
        # Without Transformer Engine megatron-core 0.16.1 leaves this name undefined, and its
        # router compares it with None.
        moe_utils.te_general_gemm = None
    return GPTModel(
        config=config,
        transformer_layer_spec=layer_spec(arguments),
        vocab_size=arguments.vocab_size,
        max_sequence_length=arguments.max_position_embeddings or arguments.seq_length,
        position_embedding_type=arguments.position_embedding_type,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
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


def build_optimizer(arguments: Arguments, model: DistributedDataParallel) -> MegatronOptimizer:
    """Build megatron-core's Adam, sharded over data-parallel ranks if asked for."""
    config = OptimizerConfig(
        optimizer="adam",
        lr=arguments.lr,
        min_lr=arguments.min_lr,
        weight_decay=arguments.weight_decay,
        adam_beta1=arguments.adam_beta1,
        adam_beta2=arguments.adam_beta2,
        adam_eps=arguments.adam_eps,
        clip_grad=arguments.clip_grad,
        bf16=arguments.bf16,
        params_dtype=torch.bfloat16 if arguments.bf16 else torch.float32,
        use_distributed_optimizer=arguments.use_distributed_optimizer,
        log_num_zeros_in_grad=arguments.log_num_zeros_in_grad,
    )
    return get_megatron_optimizer(config, [model], use_gloo_process_groups=False)


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

"""The training program's flags: Megatron-LM's names, one field each.

A field of `Arguments` is the flag of the same name (`num_layers` is `--num-layers`), and the
parser is made from the fields: to add a flag, add a field. Booleans that are off by default are
bare flags, as in Megatron-LM. Must not import torch: a wrong flag is reported at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
A = TypeVar("A", bound="Arguments")


def flag(default: T, text: str, choices: tuple[str, ...] = ()) -> T:
    """Describe one flag: its default, what it means, which words it takes."""
    made: T = field(default=default, metadata={"help": text, "choices": choices or None})
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """What one training run is asked to do. The defaults train a tiny model in seconds."""

    # Model
    num_layers: int = flag(2, "transformer layers, over all pipeline stages")
    hidden_size: int = flag(64, "width of the model")
    ffn_hidden_size: int | None = flag(None, "width of the MLP (default: 4 times the hidden size)")
    num_attention_heads: int = flag(4, "attention heads")
    num_query_groups: int | None = flag(
        None, "heads of keys and values (default: as many as attention heads)"
    )
    swiglu: bool = flag(default=False, text="gate the MLP with SiLU in the place of GELU alone")
    seq_length: int = flag(64, "tokens in a sample")
    max_position_embeddings: int | None = flag(None, "positions (default: the sequence length)")
    position_embedding_type: str = flag(
        "learned_absolute", "how positions are told", ("learned_absolute", "rope")
    )
    vocab_size: int = flag(256, "tokens there are; a multiple of the tensor parallel size")
    normalization: str = flag("LayerNorm", "kind of normalization", ("LayerNorm", "RMSNorm"))
    untie_embeddings_and_output_weights: bool = flag(
        default=False, text="give the output layer weights of its own"
    )
    disable_bias_linear: bool = flag(default=False, text="leave out the biases of linear layers")
    hidden_dropout: float = flag(0.0, "dropout of hidden states")
    attention_dropout: float = flag(0.0, "dropout of attention weights")
    init_method_std: float = flag(0.02, "standard deviation of the initial weights")
    transformer_impl: str = flag("local", "layer specification", ("local", "transformer_engine"))
    attention_backend: str = flag(
        "auto", "kernel of the attention", ("auto", "flash", "fused", "unfused", "local")
    )
    fp8_format: str | None = flag(None, "numbers of FP8 matrix products", ("e4m3", "hybrid"))
    # Mixture of experts
    num_experts: int | None = flag(None, "experts per layer (default: a dense model)")
    moe_router_topk: int = flag(2, "experts that a token is sent to")
    moe_aux_loss_coeff: float = flag(0.01, "weight of the load balancing loss")
    moe_token_dispatcher_type: str = flag(
        "allgather", "how tokens travel to experts", ("allgather", "alltoall")
    )
    # Training
    micro_batch_size: int = flag(2, "samples per forward pass of one rank")
    global_batch_size: int = flag(8, "samples per iteration, over all ranks")
    train_iters: int = flag(100, "iterations to train, counted from the first start")
    exit_interval: int | None = flag(None, "end after an iteration that this divides")
    lr: float = flag(1e-3, "highest learning rate")
    min_lr: float = flag(0.0, "lowest learning rate")
    lr_decay_style: str = flag("linear", "how it falls", ("constant", "cosine", "linear"))
    lr_warmup_iters: int = flag(0, "iterations over which it rises")
    weight_decay: float = flag(0.01, "decay of weights")
    adam_beta1: float = flag(0.9, "decay of the gradient's mean")
    adam_beta2: float = flag(0.999, "decay of the gradient's square")
    clip_grad: float = flag(1.0, "largest norm of the gradient; 0 does not clip")
    seed: int = flag(1234, "seed of data, weights and dropout")
    bf16: bool = flag(default=False, text="train in bfloat16 with fp32 main weights")
    deterministic_mode: bool = flag(default=False, text="only deterministic algorithms")
    gradient_noise: float = flag(
        0.0, "relative noise on gradients that no seed governs, as of sums in any order"
    )
    check_for_nan_in_loss_and_grad: bool = flag(
        default=True, text="end when the loss is not finite"
    )
    # Parallel layout
    tensor_model_parallel_size: int = flag(1, "ranks that share each layer")
    pipeline_model_parallel_size: int = flag(1, "stages that the layers are cut into")
    context_parallel_size: int = flag(1, "only 1: this program does not cut sequences")
    expert_model_parallel_size: int = flag(1, "data-parallel ranks that share the experts")
    expert_tensor_parallel_size: int | None = flag(
        None, "ranks that share each expert (default: as many as share a layer)"
    )
    sequence_parallel: bool = flag(default=False, text="cut activations along the sequence too")
    use_distributed_optimizer: bool = flag(
        default=False, text="share the optimizer state among data-parallel ranks"
    )
    num_layers_per_virtual_pipeline_stage: int | None = flag(
        None, "layers per chunk of a pipeline rank (default: one chunk)"
    )
    recompute_granularity: str | None = flag(
        None, "activations computed again in the backward pass", ("full", "selective")
    )
    recompute_method: str | None = flag(
        None, "layers that full recomputing concerns", ("uniform", "block")
    )
    recompute_num_layers: int | None = flag(None, "layers per unit of full recomputing")
    overlap_grad_reduce: bool = flag(default=False, text="reduce gradients during backward")
    overlap_param_gather: bool = flag(default=False, text="gather parameters during forward")
    # Checkpoints
    save: Path | None = field(
        default=None, metadata={"help": "directory to write checkpoints to", "choices": None}
    )
    load: Path | None = field(
        default=None,
        metadata={"help": "directory to resume from; without a checkpoint: start", "choices": None},
    )
    save_interval: int | None = flag(None, "iterations between checkpoints")
    ckpt_format: str = flag("torch_dist", "format of checkpoints", ("torch_dist",))
    # Logging
    log_interval: int = flag(1, "iterations between log lines")
    tensorboard_dir: Path | None = field(
        default=None, metadata={"help": "directory to write TensorBoard events to", "choices": None}
    )
    log_num_zeros_in_grad: bool = flag(default=False, text="log num-zeros")
    log_memory_to_tensorboard: bool = flag(default=False, text="log mem-allocated-bytes and others")
    log_timers_to_tensorboard: bool = flag(default=False, text="log iteration-time")
    # The harness's own tests
    fault: str | None = flag(None, "misbehave: kill@ITERATION, or nan@ITERATION for its loss")

    @property
    def virtual_pipeline_model_parallel_size(self) -> int | None:
        """Chunks of layers on each pipeline rank; None is one chunk."""
        layers = self.num_layers_per_virtual_pipeline_stage
        if layers is None:
            return None
        return self.num_layers // (self.pipeline_model_parallel_size * layers)

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of the dense model."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size


def make_parser(
    kind: type[Arguments] = Arguments,
    prog: str = "train_gpt.py",
    description: str = "Train a small GPT on synthetic text with megatron-core.",
) -> argparse.ArgumentParser:
    """Make the parser from the fields of `kind`, which may add some to those of `Arguments`."""
    parser = argparse.ArgumentParser(
        prog=prog,
        usage="%(prog)s [--flag value ...] (--help lists the flags)",
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    hints = typing.get_type_hints(kind)
    for one in dataclasses.fields(kind):
        name, text = "--" + one.name.replace("_", "-"), one.metadata["help"]
        if hints[one.name] is bool:
            action = argparse.BooleanOptionalAction if one.default else "store_true"
            parser.add_argument(name, action=action, default=one.default, help=text)
            continue
        types = [t for t in typing.get_args(hints[one.name]) if t is not type(None)]
        parser.add_argument(
            name,
            type=types[0] if types else hints[one.name],
            nargs="+" if typing.get_origin(hints[one.name]) is tuple else None,
            default=one.default,
            choices=one.metadata["choices"],
            help=text,
        )
    return parser


def parse_arguments(argv: Sequence[str], world_size: int) -> Arguments:
    """Read the command line of the training program.

    Raises:
        SystemExit: As from `parse_with`.
    """
    return parse_with(make_parser(), Arguments, argv, world_size)


def parse_with(
    parser: argparse.ArgumentParser, kind: type[A], argv: Sequence[str], world_size: int
) -> A:
    """Read a command line whose flags are the fields of `kind`.

    Raises:
        SystemExit: With code 2, after a message, when a flag is unknown or the values do not fit
            together or the world.
    """
    arguments = kind(**vars(parser.parse_args(argv)))
    try:
        check(arguments, world_size)
    except ValueError as error:
        parser.error(str(error))
    return arguments


def check(arguments: Arguments, world_size: int) -> None:
    """Check what megatron-core would take and train as something else, or not save.

    Raises:
        ValueError: The message names the flag, the value and what was expected.
    """
    if arguments.context_parallel_size != 1:
        raise ValueError("--context-parallel-size: this program does not cut sequences, expected 1")
    if world_size % arguments.model_parallel_size:
        raise ValueError(
            f"--tensor-model-parallel-size {arguments.tensor_model_parallel_size} times"
            f" --pipeline-model-parallel-size {arguments.pipeline_model_parallel_size} does not"
            f" divide the {world_size} ranks that were started"
        )
    per_step = arguments.micro_batch_size * (world_size // arguments.model_parallel_size)
    if arguments.global_batch_size % per_step:
        raise ValueError(
            f"--global-batch-size: {arguments.global_batch_size} is not a multiple of {per_step},"
            " the micro batch size times the data parallel size"
        )
    if arguments.fp8_format is not None and not (
        arguments.bf16 and arguments.transformer_impl == "transformer_engine"
    ):
        raise ValueError("--fp8-format: needs --transformer-impl transformer_engine and --bf16")
    is_saved = arguments.save is not None or arguments.load is not None
    if is_saved and arguments.num_layers_per_virtual_pipeline_stage is not None:
        raise ValueError(
            "--num-layers-per-virtual-pipeline-stage: this program saves one chunk a rank; drop it"
        )
    if arguments.save_interval is not None and arguments.save is None:
        raise ValueError("--save-interval: needs --save DIRECTORY")

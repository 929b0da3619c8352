"""Compare the estimate of memory with models that megatron-core builds: rows of Megatron-LM.

    python benchmarks/memory_formulas.py CHECKOUT [--only WORD] [-v]

Of each row whose arguments describe its model, one rank of each pipeline stage is built in whole
size, with its gradient buffers and its optimizer, on the device `meta` and on torch's fake process
groups: nothing is allocated, and no GPU is needed. The fullest stage is compared with the estimate:
parameters without routed experts, those of experts, bytes of the optimizer. Embeddings count where
the row gives their size. Local layers stand for those of Transformer Engine, which have the same
parameters but for names. A row that builds and that the checks of layouts refuse is named.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe import moe_utils
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from typing_extensions import override

from pytest_megatron.errors import MegatronError
from pytest_megatron.workloads.recipe.case import CaseMode, ModelArgs, case_of, sizes_of
from pytest_megatron.workloads.recipe.expand import Profile
from pytest_megatron.workloads.recipe.load import find_recipes, read_recipe
from pytest_megatron.workloads.training.checks.layout import (
    CheckedStart,
    check_layout,
    starts_of,
)
from pytest_megatron.workloads.training.checks.memory import Estimate, _pattern, estimate_memory

WITHIN = 0.1
EMBEDDINGS = ("embedding.word_embeddings", "output_layer")
# What the local layers or torch's optimizer lack, or what changes what a rank holds.
NOT_BUILT = (
    *("--use-torch-fsdp2", "--use-megatron-fsdp", "--optimizer-cpu-offload", "--fp8-param-gather"),
    *("--exp-avg-dtype", "--exp-avg-sq-dtype", "--main-grads-dtype", "--inference-max-requests"),
    *(
        "--heterogeneous-layers-config-path",
        "--experimental-attention-variant",
        "--mtp-use-repeated-layer",
    ),
)
RECIPES = Path("tests/test_utils/recipes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What a rank holds: numbers of parameters, bytes of the optimizer."""

    dense: float
    experts: float
    optimizer: float


def starts(checkout: Path) -> Iterator[tuple[str, CheckedStart]]:
    """Yield the first start of each row, each set of arguments once."""
    seen = set()
    os.chdir(checkout)
    for recipe in find_recipes([RECIPES]):
        for row in read_recipe(recipe, Profile.COMPAT).workloads:
            try:
                found = next(iter(starts_of(row, case_of(Path(), row))), None)
            except MegatronError:
                continue
            if found is None or found.mode is CaseMode.INFERENCE:
                continue
            key = (row.model, row.test_case, found.ranks)
            if key not in seen:
                seen.add(key)
                yield f"{row.model}/{row.test_case}, {found.ranks} ranks", found


def main() -> int:
    """Print a line for each row and the shares within 10 %."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("-v", action="store_true", dest="is_verbose")
    asked = parser.parse_args()
    warnings.filterwarnings("ignore")
    left_out: Counter[str] = Counter()
    off: dict[str, list[float]] = {"dense": [], "experts": [], "optimizer": []}
    for name, start in starts(asked.checkout):
        if asked.only not in name:
            continue
        estimate = estimate_memory(start)
        if estimate is None:
            left_out["the arguments do not describe the model"] += 1
            continue
        if start.arguments.has_any(*NOT_BUILT) or not start.ranks:
            left_out["not built here"] += 1
            continue
        sizes = sizes_of(start.arguments)
        assert sizes is not None
        per_stage = start.ranks // sizes.pp
        built = [_in_fork(start, stage * per_stage, estimate) for stage in range(sizes.pp)]
        problems = [found for found in built if isinstance(found, str)]
        if problems:
            left_out[f"cannot be built: {problems[0]}"] += 1
            print(f"{name}: {problems[0]}", flush=True)
            continue
        held = max((h for h in built if isinstance(h, Held)), key=lambda h: h.dense + h.experts)
        guess = _estimated(estimate)
        words = []
        for part, errors in off.items():
            real, formula = getattr(held, part), getattr(guess, part)
            if real or formula:
                error = formula / real - 1 if real else float("inf")
                errors.append(error)
                words.append(f"{part} {formula / 1e6:.1f} M of {real / 1e6:.1f} M ({error:+.1%})")
        refused = [hit.rule for hit in check_layout(start)]
        left_out.update(f"builds, and is refused: {name}: {rule}" for rule in refused)
        print(f"{name}: {', '.join(words)}", flush=True)
    for part, errors in off.items():
        within = sum(abs(error) <= WITHIN for error in errors)
        worst = max(errors, key=abs, default=0.0)
        print(f"{part}: {within} of {len(errors)} within {WITHIN:.0%}, the worst {worst:+.1%}")
    for why, number in left_out.most_common():
        print(f"left out: {number}: {why}")
    return 0


def _estimated(estimate: Estimate) -> Held:
    held = estimate.parameters
    optimizer = held.dense * estimate.dense.optimizer + held.experts * estimate.expert.optimizer
    return Held(dense=held.dense, experts=held.experts, optimizer=optimizer)


def _in_fork(start: CheckedStart, rank: int, estimate: Estimate) -> Held | str:
    """Build a rank in a process of its own; return why it cannot be where it cannot."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            found: dict[str, float | str] = asdict(
                build(start, rank, has_vocabulary=estimate.parameters.has_vocabulary)
            )
        except BaseException as error:  # noqa: BLE001 - is told
            if "-v" in sys.argv:
                traceback.print_exc()
            found = {"problem": f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"}
        os.write(write, json.dumps(found).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        answer = json.loads(pipe.read())
    os.waitpid(pid, 0)
    return str(answer["problem"]) if "problem" in answer else Held(**answer)


class _CudaIsMeta(TorchFunctionMode):
    """Makes on `meta` what is asked for on `cuda`."""

    @override
    def __torch_function__(  # type: ignore[explicit-any] # takes any function of torch
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        more = dict(kwargs or {})
        if str(more.get("device", "")).startswith("cuda"):
            more["device"] = "meta"
        result = func(*args, **more)
        is_type = func is torch.Tensor.type
        return result.replace("meta", "cuda") if is_type and isinstance(result, str) else result


def _pretend_cuda() -> None:
    """Give megatron-core what it asks of CUDA while it builds."""
    vars(torch.cuda).update(
        current_device=lambda: torch.device("meta"),
        Stream=lambda *_, **__: None,
        Event=lambda *_, **__: None,
    )
    setattr(torch.Tensor, "cuda", lambda tensor, *_, **__: tensor)  # noqa: B010 - for mypy


def build(start: CheckedStart, rank: int, *, has_vocabulary: bool) -> Held:
    """Build model and optimizer of a rank on fake groups; return what they hold."""
    given, sizes = start.arguments, sizes_of(start.arguments)
    assert sizes is not None
    _pretend_cuda()
    moe_utils.te_general_gemm = None  # undefined without Transformer Engine
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=start.ranks)
    virtual = _virtual(given, sizes.pp)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tp,
        pipeline_model_parallel_size=sizes.pp,
        virtual_pipeline_model_parallel_size=virtual,
        context_parallel_size=sizes.cp,
        expert_model_parallel_size=sizes.ep,
        expert_tensor_parallel_size=sizes.etp,
        create_gloo_process_groups=False,
    )
    config = _config(given, virtual)
    is_distributed = given.is_on("--use-distributed-optimizer")
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=not given.is_on("--grad-reduce-in-bf16"),
        use_distributed_optimizer=is_distributed,
    )
    with torch.device("meta"), _CudaIsMeta():
        bare = [
            _gpt(given, config, stage) for stage in ([None] if virtual is None else range(virtual))
        ]
        is_reduced = given.is_on("--bf16", "--fp16")
        wrapped = [Float16Module(config, chunk) if is_reduced else chunk for chunk in bare]
        named = [(name, p) for chunk in bare for name, p in chunk.named_parameters()]
        if not has_vocabulary:
            for name, parameter in named:
                parameter.requires_grad &= not name.startswith(EMBEDDINGS)
        named = [(name, p) for name, p in named if p.requires_grad]
        chunks = [DistributedDataParallel(config, ddp, chunk) for chunk in wrapped]
        optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer=given.text("--optimizer") or "adam",
                lr=1e-3,
                bf16=given.is_on("--bf16"),
                fp16=given.is_on("--fp16"),
                params_dtype=config.params_dtype,
                use_distributed_optimizer=is_distributed,
            ),
            chunks,
            use_gloo_process_groups=False,
        )
    weights = [parameter for _, parameter in named]
    experts = sum(parameter.numel() for name, parameter in named if ".experts." in name)
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return Held(
        dense=sum(weight.numel() for weight in weights) - experts,
        experts=experts,
        optimizer=sum(_bytes(part.optimizer, weights) for part in parts),
    )


def _virtual(given: ModelArgs, stages: int) -> int | None:
    """Return the number of virtual stages of a rank; None without."""
    number = given.number("--num-virtual-stages-per-pipeline-rank")
    of_one, layers = (
        given.number("--num-layers-per-virtual-pipeline-stage"),
        given.number("--num-layers"),
    )
    if of_one and layers:
        number = layers // stages // of_one
    return number if number and number > 1 else None


def _config(given: ModelArgs, virtual: int | None) -> TransformerConfig:
    """Return the arguments in megatron-core's words, with Megatron-LM's defaults.

    Source: megatron/training/arguments.py, d98e8a64dd
    """
    sizes = sizes_of(given)
    hidden, heads = given.number("--hidden-size"), given.number("--num-attention-heads")
    assert sizes is not None
    assert hidden
    assert heads
    is_swiglu = given.is_on("--swiglu")
    width = given.number("--ffn-hidden-size")
    dtype = (
        torch.bfloat16
        if given.is_on("--bf16")
        else torch.float16
        if given.is_on("--fp16")
        else torch.float32
    )
    common: dict[str, object] = {
        "num_layers": given.number("--num-layers"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "ffn_hidden_size": width
        or (int(4 * hidden * 2 / 3 / 64) * 64 if is_swiglu else 4 * hidden),
        "kv_channels": given.number("--kv-channels"),
        "num_query_groups": (given.number("--num-query-groups") or 1)
        if given.is_on("--group-query-attention")
        else None,
        "gated_linear_unit": is_swiglu,
        "normalization": given.text("--normalization") or "LayerNorm",
        "add_bias_linear": not given.is_on("--disable-bias-linear"),
        "add_qkv_bias": given.is_on("--add-qkv-bias"),
        "qk_layernorm": given.is_on("--qk-layernorm"),
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": given.is_on("--bf16"),
        "fp16": given.is_on("--fp16"),
        "perform_initialization": False,
        "tensor_model_parallel_size": sizes.tp,
        "pipeline_model_parallel_size": sizes.pp,
        "virtual_pipeline_model_parallel_size": virtual,
        "expert_model_parallel_size": sizes.ep,
        "expert_tensor_parallel_size": sizes.etp,
        "num_layers_in_first_pipeline_stage": given.number("--decoder-first-pipeline-num-layers"),
        "num_layers_in_last_pipeline_stage": given.number("--decoder-last-pipeline-num-layers"),
        "account_for_embedding_in_pipeline_split": given.is_on(
            "--account-for-embedding-in-pipeline-split"
        ),
        "account_for_loss_in_pipeline_split": given.is_on("--account-for-loss-in-pipeline-split"),
        "mtp_num_layers": given.number("--mtp-num-layers"),
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
    }
    if experts := given.number("--num-experts"):
        text = given.text("--moe-layer-freq") or "1"
        common |= {
            "num_moe_experts": experts,
            "moe_ffn_hidden_size": given.number("--moe-ffn-hidden-size")
            or common["ffn_hidden_size"],
            "moe_shared_expert_intermediate_size": given.number(
                "--moe-shared-expert-intermediate-size"
            ),
            "moe_layer_freq": int(text) if text.isdecimal() else _pattern(text),
            "moe_router_topk": 2,
            "moe_token_dispatcher_type": "alltoall",
            "add_bias_linear": False,
        }
    if given.is_on("--multi-latent-attention"):
        return MLATransformerConfig(
            **common,
            q_lora_rank=given.number("--q-lora-rank"),
            kv_lora_rank=given.number("--kv-lora-rank") or 32,
            qk_head_dim=given.number("--qk-head-dim") or 128,
            qk_pos_emb_head_dim=given.number("--qk-pos-emb-head-dim") or 64,
            v_head_dim=given.number("--v-head-dim") or 128,
            rope_type="rope",
        )
    return TransformerConfig(**common)


def _gpt(given: ModelArgs, config: TransformerConfig, stage: int | None) -> GPTModel:
    """Build the part of a (virtual) stage."""
    if config.num_moe_experts:
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=stage)
    else:
        spec = get_gpt_layer_local_spec(
            qk_layernorm=config.qk_layernorm,
            multi_latent_attention=config.multi_latent_attention,
            normalization=config.normalization,
        )
    mtp = None
    if config.mtp_num_layers:
        mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False, vp_stage=stage)
    multiple = (
        given.number("--make-vocab-size-divisible-by") or 128
    ) * config.tensor_model_parallel_size
    words = given.number("--vocab-size") or multiple
    positions = given.text("--position-embedding-type") or "learned_absolute"
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=-(-words // multiple) * multiple,
        max_sequence_length=given.number("--max-position-embeddings") or 1024,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        share_embeddings_and_output_weights=not given.is_on(
            "--untie-embeddings-and-output-weights"
        ),
        position_embedding_type="rope"
        if given.is_on("--use-rotary-position-embeddings")
        else positions,
        mtp_block_spec=mtp,
        vp_stage=stage,
    )


def _bytes(optimizer: torch.optim.Optimizer, weights: Iterable[torch.Tensor]) -> int:
    """Take a step, and return the bytes of moments, and of weights that only the optimizer has."""
    model = {weight.untyped_storage()._cdata for weight in weights}
    held = [weight for group in optimizer.param_groups for weight in group["params"]]
    for weight in held:
        weight.grad = torch.zeros_like(weight)
    for group in optimizer.param_groups:
        group["foreach"] = group["fused"] = False
    optimizer.step()
    states = [t for state in optimizer.state.values() for t in state.values() if t.dim()]
    copies = [weight for weight in held if weight.untyped_storage()._cdata not in model]
    return sum(tensor.numel() * tensor.element_size() for tensor in (*states, *copies))


if __name__ == "__main__":
    sys.exit(main())

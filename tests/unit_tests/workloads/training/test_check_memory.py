from __future__ import annotations

import pytest
from check_rows import case, row

from pytest_megatron.workloads.recipe.case import CaseMode, ModelArgs, WorkloadCase
from pytest_megatron.workloads.training.checks.check import findings_of, hits_of
from pytest_megatron.workloads.training.checks.layout import starts_of
from pytest_megatron.workloads.training.checks.memory import (
    GIB,
    Estimate,
    bytes_of,
    estimate_memory,
)

# 4 B parameters, as Megatron-LM's case of one rank whose golden says 62.66 GiB were allocated.
DENSE = {
    "--num-layers": "32",
    "--hidden-size": "3072",
    "--ffn-hidden-size": "8192",
    "--num-attention-heads": "32",
    "--kv-channels": "128",
    "--group-query-attention": "true",
    "--num-query-groups": "8",
    "--swiglu": "true",
    "--seq-length": "512",
    "--micro-batch-size": "2",
    "--vocab-size": "50304",
    "--untie-embeddings-and-output-weights": "true",
    "--bf16": "true",
    "--use-distributed-optimizer": "true",
}
MOE = {
    "--num-layers": "4",
    "--hidden-size": "1024",
    "--num-attention-heads": "8",
    "--num-experts": "16",
    "--moe-ffn-hidden-size": "4096",
    "--ffn-hidden-size": "4096",
    "--tensor-model-parallel-size": "4",
    "--expert-model-parallel-size": "2",
    "--expert-tensor-parallel-size": "1",
    "--bf16": "true",
}
EXPERT = 2 * 1024 * 4096  # parameters


def estimate(some: WorkloadCase, **changes: str | int) -> Estimate:
    (start,) = starts_of(row(**changes), some)
    found = estimate_memory(start)
    assert found is not None
    return found


def ids(some: WorkloadCase, **changes: str | int) -> list[str]:
    return [finding.rule.id for finding in findings_of(hits_of(row(**changes), some, {}))]


def test_what_megatron_measured_for_weights_gradients_and_optimizer_comes_out() -> None:
    found = estimate(case(sound=DENSE), gpus=1, nodes=1)
    assert (found.total - found.rest) / GIB == pytest.approx(62.66, rel=2e-3)


@pytest.mark.parametrize(
    ("changes", "number"),
    [
        ({}, 2048),
        ({"--tensor-model-parallel-size": "8"}, 2048),  # which does not divide them
        ({"--position-embedding-type": "rope"}, 0),
        ({"--use-rotary-position-embeddings": "true"}, 0),
    ],
)
def test_learned_position_embeddings_are_on_each_rank_of_a_stage(
    changes: dict[str, str | None], number: int
) -> None:
    without, has = (
        estimate(case({**changes, "--max-position-embeddings": most}, sound=MOE), gpus=8, nodes=1)
        for most in (None, "2048")
    )
    assert has.parameters.dense - without.parameters.dense == number * 1024


def test_experts_are_split_by_ep_and_etp_and_not_by_tp() -> None:
    held = [
        estimate(case(changes, sound=MOE), gpus=8, nodes=1).parameters.experts / EXPERT
        for changes in (
            {},
            {"--expert-model-parallel-size": "8"},
            {"--expert-tensor-parallel-size": "2"},
            {"--expert-tensor-parallel-size": None},  # it is TP then
            {"--tensor-model-parallel-size": "8"},
        )
    ]
    assert held == [4 * 8, 4 * 2, 4 * 4, 4 * 2, 4 * 8]


@pytest.mark.parametrize(
    ("frequency", "layers"),
    [
        ("1", 4),
        ("2", 2),
        ("([0]*1+[1]*3)", 3),
        ("[0,1]*2", 2),
        ("[1]*3", None),
        ("__import__('os')", None),
        ("[1]*9**9", None),
        ("([1]*4", None),
    ],
)
def test_layers_without_experts_hold_none(frequency: str, layers: int | None) -> None:
    (start,) = starts_of(row(gpus=8, nodes=1), case({"--moe-layer-freq": frequency}, sound=MOE))
    found = estimate_memory(start)
    assert (None if found is None else found.parameters.experts / EXPERT / 8) == layers


@pytest.mark.parametrize(
    ("arguments", "ranks", "each"),
    [
        ("--bf16", 8, (2, 4, 12)),
        ("--bf16 --use-distributed-optimizer", 8, (2, 4, 1.5)),
        ("--bf16 --grad-reduce-in-bf16", 8, (2, 2, 12)),
        ("--fp16", 8, (2, 2, 12)),
        ("--fp16 --accumulate-allreduce-grads-in-fp32", 8, (2, 4, 12)),
        ("", 8, (4, 4, 8)),
        ("--bf16 --optimizer=muon", 8, (2, 4, 8)),
        ("--bf16 --optimizer-cpu-offload", 8, (2, 4, 0)),
        ("--bf16 --fp8-param-gather", 8, (1, 4, 12)),
        ("--bf16 --exp-avg-dtype=fp8 --exp-avg-sq-dtype=bf16", 8, (2, 4, 7)),
        ("--bf16 --use-torch-fsdp2", 8, (0.25, 0.5, 1.5)),
        (
            "--bf16 --use-megatron-fsdp --data-parallel-sharding-strategy=optim_grads_params",
            8,
            (0.25, 0.5, 1.5),
        ),
        ("--bf16 --use-megatron-fsdp --data-parallel-sharding-strategy=optim", 8, (2, 4, 1.5)),
    ],
)
def test_a_parameter_takes_what_precision_optimizer_and_sharding_say(
    arguments: str, ranks: int, each: tuple[float, float, float]
) -> None:
    words = [word.partition("=") for word in arguments.split()]
    given = case({name: value or "true" for name, _, value in words}, sound={})
    found = bytes_of(ModelArgs(given.arguments), ranks, is_training=True)
    assert (found.weight, found.gradient, found.optimizer) == each


def test_a_model_that_does_not_fit_is_warned_of_with_its_arithmetic() -> None:
    some = case(sound={**DENSE, "--num-layers": "48"})
    assert ids(some, gpus=1, nodes=1, platforms="dgx_h200") == []
    assert ids(some, gpus=8, nodes=1) == []  # the optimizer is shared by 8
    (finding,) = findings_of(hits_of(row(gpus=1, nodes=1), some, {}))
    assert (finding.rule.id, finding.is_error) == ("memory-estimate", False)
    assert finding.found == (
        "about 96.0 GiB of a GPU are needed, and one of dgx_h100 has 80.0 GiB: 5.44 G parameters "
        "x 18 bytes (2 weights + 4 gradients + 12 optimizer) = 91.3 GiB + activations (rough) "
        "4.8 GiB = 96.0 GiB"
    )


def test_weights_alone_that_do_not_fit_are_an_error() -> None:
    wide = {"--num-experts": "512", "--hidden-size": "8192", "--moe-ffn-hidden-size": "8192"}
    some = case(wide, sound=MOE)
    assert ids(some, gpus=8, nodes=1) == ["memory-weights"]
    fits = case({**wide, "--expert-model-parallel-size": "128"}, sound=MOE)
    assert "memory-weights" not in ids(fits, gpus=8, nodes=64)
    (finding,) = findings_of(hits_of(row(gpus=8, nodes=1), some, {}))
    assert finding.is_error
    assert "parameters of 512 experts / (EP 2 = 2) x 18 bytes" in finding.found


def test_the_gpu_that_is_here_counts_and_not_the_platforms_name() -> None:
    some = case(sound=DENSE)
    hits = hits_of(row(gpus=1, nodes=1), some, {}, memory_bytes=40 * GIB)
    assert [finding.rule.id for finding in findings_of(hits)] == ["memory-estimate"]


def test_inference_needs_weights_and_cache() -> None:
    cache = {"--inference-dynamic-batching-buffer-size-gb": "20"}
    found = estimate(case(cache, sound=DENSE, mode=CaseMode.INFERENCE), gpus=1, nodes=1)
    assert (found.dense.total, found.rest) == (2, 20 * GIB)
    unified = {**cache, "--inference-dynamic-batching-unified-memory-level": "1"}
    some = case(unified, sound=DENSE, mode=CaseMode.INFERENCE)
    assert estimate(some, gpus=1, nodes=1).rest == 0


@pytest.mark.parametrize(
    "other",
    [
        {"--model-provider": "llava_vlm"},
        {"--hybrid-layer-pattern": "M*M*"},
        {"--use-checkpoint-args": "true"},
        {"--encoder-num-layers": "12"},
        {"--export-quant-cfg": "fp8"},
        {"--num-layers": "${LAYERS}"},
    ],
)
def test_a_model_that_the_arguments_do_not_describe_is_not_estimated(other: dict[str, str]) -> None:
    (start,) = starts_of(row(), case(other, sound=DENSE))
    assert estimate_memory(start) is None

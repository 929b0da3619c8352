"""Clean pairs of the exam.

A pair trains the same but for rounding: a divergence is a false alarm.
"""

from __future__ import annotations

from exam_cases import (
    ALL_TO_ALL,
    BF16,
    DROPOUT,
    EP2,
    FOUR_LAYERS,
    LLAMA,
    MOE,
    PP2,
    PP4,
    SHARDED,
    SP,
    TP2,
    TP4,
    UNIFORM,
    UNTIED,
    VIRTUAL,
    layout,
)

LAYOUTS = (
    layout("gpt-tp2", 2, TP2),
    layout("gpt-tp4-sp", 4, TP4, SP),
    layout("gpt-pp4", 4, PP4, common=[FOUR_LAYERS]),
    layout("gpt-dp2", 2),
    layout("gpt-dp2-sharded", 2, SHARDED),
    layout("gpt-dp4-sharded", 4, SHARDED),
    layout("gpt-tp2-pp2", 4, TP2, PP2),
    layout("gpt-pp2-dp2-sharded", 4, PP2, SHARDED),
    layout("gpt-tp2-sp-dp2-sharded", 4, TP2, SP, SHARDED),
    layout("gpt-tp2-sp-virtual", 4, TP2, SP, PP2, VIRTUAL, common=[FOUR_LAYERS]),
    layout("gpt-recompute-dropout", 2, UNIFORM, common=[TP2, DROPOUT], reference_ranks=2),
    layout("gpt-micro-1x8", 1, {"--micro-batch-size": 1}, reference=[{"--micro-batch-size": 8}]),
    layout("gpt-micro-4x1", 1, {"--micro-batch-size": 4}, reference=[{"--micro-batch-size": 1}]),
    layout("gpt-untied-tp2", 2, TP2, common=[UNTIED]),
    layout("llama-pp2", 2, PP2, common=[LLAMA]),
    layout("moe-ep2-alltoall", 2, EP2, ALL_TO_ALL, common=[MOE]),
    layout("moe-ep2-dp4", 4, EP2, common=[MOE]),
    layout("moe-tp2-sp", 2, TP2, SP, common=[MOE]),
    layout("moe-ep2-sharded", 2, EP2, SHARDED, common=[MOE]),
    layout("bf16-gpt-tp2", 2, TP2, common=[BF16]),
    layout("bf16-gpt-tp2-sp", 2, TP2, SP, common=[BF16]),
    layout("bf16-gpt-dp2-sharded", 2, SHARDED, common=[BF16]),
    layout("bf16-gpt-recompute", 1, UNIFORM, common=[BF16]),
    layout(
        "bf16-gpt-micro-1x8",
        1,
        {"--micro-batch-size": 1},
        common=[BF16],
        reference=[{"--micro-batch-size": 8}],
    ),
    layout("bf16-llama-tp2", 2, TP2, common=[BF16, LLAMA]),
    layout("bf16-moe-tp2-sp", 2, TP2, SP, common=[BF16, MOE]),
    layout("bf16-moe-ep2-tp2", 4, EP2, TP2, SP, common=[BF16, MOE]),
    layout("llama-bf16-against-fp32", 1, BF16, common=[LLAMA]),
)

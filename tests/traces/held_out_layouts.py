"""Clean pairs of the exam that are kept apart from work on the comparison.
"""

from __future__ import annotations

from exam_cases import (ALL_TO_ALL, BF16, EP2, FOUR_LAYERS, LLAMA, MOE, ONE_RANK_EXPERTS, PP2, SELECTIVE, SHARDED, SP, SWIGLU, TP2, TP4, UNIFORM, UNTIED, VIRTUAL, layout)

LAYOUTS = (
    layout("gpt-tp4", 4, TP4),
    layout("gpt-tp2-sp", 2, TP2, SP),
    layout("gpt-pp2", 2, PP2),
    layout("gpt-virtual", 2, PP2, VIRTUAL, common=[FOUR_LAYERS]),
    layout("gpt-dp4", 4),
    layout("gpt-dp2-overlap", 2, {"--overlap-grad-reduce": True}),
    layout("gpt-tp2-dp2", 4, TP2),
    layout("gpt-recompute-full", 1, UNIFORM),
    layout("gpt-recompute-selective", 1, SELECTIVE),
    layout("gpt-untied-pp2", 2, PP2, common=[UNTIED]),
    layout("gpt-rms-no-bias-tp2", 2, TP2, common=[{"--normalization": "RMSNorm", "--disable-bias-linear": True}]),
    layout("gpt-pp2-against-tp2", 2, PP2, reference=[TP2], reference_ranks=2),
    layout("llama-tp2", 2, TP2, common=[LLAMA]),
    layout("llama-tp2-sp", 2, TP2, SP, common=[LLAMA]),
    layout("llama-virtual", 2, PP2, VIRTUAL, common=[LLAMA, FOUR_LAYERS]),
    layout("llama-dp2-sharded", 2, SHARDED, common=[LLAMA]),
    layout("moe-ep2", 2, EP2, common=[MOE]),
    layout("moe-ep2-tp2", 4, EP2, TP2, SP, common=[MOE]),
    layout("moe-ep2-tp2-alltoall", 4, EP2, TP2, SP, ALL_TO_ALL, ONE_RANK_EXPERTS, common=[MOE]),
    layout("moe-pp2", 2, PP2, common=[MOE]),
    layout("moe-swiglu-ep2", 2, EP2, ALL_TO_ALL, common=[MOE, SWIGLU]),
    layout("moe-recompute", 1, UNIFORM, common=[MOE]),
    layout("bf16-gpt-pp2", 2, PP2, common=[BF16]),
    layout("bf16-gpt-virtual", 2, PP2, VIRTUAL, common=[BF16, FOUR_LAYERS]),
    layout("bf16-gpt-tp2-pp2", 4, TP2, PP2, common=[BF16]),
    layout("bf16-llama-pp2-dp2-sharded", 4, PP2, SHARDED, common=[BF16, LLAMA]),
    layout("bf16-moe-ep2", 2, EP2, ALL_TO_ALL, common=[BF16, MOE]),
    layout("gpt-bf16-against-fp32", 1, BF16),
    layout("gpt-tp2-bf16-against-fp32", 2, TP2, BF16),
)

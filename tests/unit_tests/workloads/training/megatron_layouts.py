"""Prints for each layout on stdin whether the installed megatron-core builds it; a program.

A layout is a mapping of options to numbers. Written beside megatron-core's own checks are those of
Megatron-LM's parser of arguments, which the package does not have.
"""

from __future__ import annotations

import contextlib
import json
import sys

import torch
from megatron.core.num_microbatches_calculator import ConstantNumMicroBatchesCalculator
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import get_num_layers_to_build

Layout = dict[str, int]


def builds(layout: Layout) -> bool:
    """Whether megatron accepts a layout and builds as many layers as it was asked for."""
    stages, layers = layout["pp"], layout["layers"]
    first, last, virtual = (layout.get(name) for name in ("first", "last", "virtual"))
    if layout["hidden"] % layout["heads"] or (virtual and stages == 1):
        return False
    if first is None and last is None and layers % stages:
        return False
    with contextlib.suppress(ValueError, AssertionError):
        config = TransformerConfig(
            num_layers=layers,
            hidden_size=layout["hidden"],
            num_attention_heads=layout["heads"],
            num_query_groups=layout["groups"],
            tensor_model_parallel_size=layout["tp"],
            pipeline_model_parallel_size=stages,
            virtual_pipeline_model_parallel_size=virtual,
            num_layers_in_first_pipeline_stage=first,
            num_layers_in_last_pipeline_stage=last,
            pipeline_dtype=torch.bfloat16,
        )
        parts = [
            get_num_layers_to_build(config, part, stage)
            for stage in range(stages)
            for part in range(virtual or 1)
        ]
        ConstantNumMicroBatchesCalculator(
            layout["batch"],
            layout["micro"],
            layout["dp"],
            decrease_batch_size_if_needed=False,
            rank=0,
        )
        return bool(sum(parts) == layers and min(parts) >= 0)
    return False


if __name__ == "__main__":
    json.dump([builds(layout) for layout in json.load(sys.stdin)], sys.stdout)

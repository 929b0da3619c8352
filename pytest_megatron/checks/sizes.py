"""The parallel sizes of a start, and how layers fall on pipeline stages. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from pytest_megatron.launch.connections import CP, TP
from pytest_megatron.launch.model_args import ModelArgs

__all__ = ["CP", "EP", "ETP", "PP", "TP", "ParallelSizes", "product_text", "sizes_of"]

PP = "--pipeline-model-parallel-size"
EP = "--expert-model-parallel-size"
ETP = "--expert-tensor-parallel-size"
# Sizes of older releases that put an encoder on ranks of its own.
_ENCODERS = ("--encoder-tensor-model-parallel-size", "--encoder-pipeline-model-parallel-size")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSizes:
    """Tensor, pipeline, context, expert and expert-tensor parallel sizes."""

    tp: int
    pp: int
    cp: int
    ep: int
    etp: int


def sizes_of(arguments: ModelArgs) -> ParallelSizes | None:
    """Return the sizes; None where one is no number, or an encoder has ranks of its own."""
    tp, pp, cp, ep = (arguments.size(name) for name in (TP, PP, CP, EP))
    etp = arguments.size(ETP) if ETP in arguments else tp
    if not (tp and pp and cp and ep and etp) or arguments.has_any(*_ENCODERS):
        return None
    return ParallelSizes(tp=tp, pp=pp, cp=cp, ep=ep, etp=etp)


def product_text(sizes: Mapping[str, int]) -> str:
    """Return `TP 2 x PP 4 = 8`; sizes of 1 are left out."""
    shown = {name: size for name, size in sizes.items() if size > 1} or sizes
    product = math.prod(sizes.values())
    return " x ".join(f"{name} {size}" for name, size in shown.items()) + f" = {product}"

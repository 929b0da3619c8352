"""Whether ranks, layers, heads, experts, sequences and batches can be divided as a case says. Pure.

An argument that is not a number, or that comes from a checkpoint, is left alone.

Source: Megatron-LM megatron/training/arguments.py, megatron/core/parallel_state.py,
transformer/transformer_config.py and num_microbatches_calculator.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from pytest_megatron.checks.rules import RuleMatch
from pytest_megatron.checks.sizes import CP, EP, ETP, PP, TP, ParallelSizes, product_text, sizes_of
from pytest_megatron.checks.stages import check_stages
from pytest_megatron.checks.start import CheckedStart
from pytest_megatron.launch.case import CaseMode

EXPERTS = "--num-experts"
_HEADS, _GROUPS = "--num-attention-heads", "--num-query-groups"
_HIDDEN = "--hidden-size"
_SEQUENCES = ("--seq-length", "--encoder-seq-length", "--decoder-seq-length")
_MICRO, _GLOBAL = "--micro-batch-size", "--global-batch-size"
# A schedule of batch sizes has rules of its own.
_OTHER_BATCHES = (
    *("--rampup-batch-size", "--step-batch-size-schedule", "--decrease-batch-size-if-needed"),
    *("--hybrid-context-parallel", "--dynamic-context-parallel"),
)


def check_layout(start: CheckedStart) -> Iterator[RuleMatch]:
    """Yield what cannot be divided as the arguments say."""
    sizes = sizes_of(start.arguments)
    if sizes is None or not start.ranks:
        return
    wrong = [*_ranks(start, sizes)]
    yield from wrong
    if start.has_own_shape:
        yield from check_stages(start, sizes)
        yield from _heads(start, sizes)
        yield from _experts(start, sizes)
        yield from _sequences(start, sizes)
    if not wrong:
        yield from _batches(start, sizes)


def _ranks(start: CheckedStart, sizes: ParallelSizes) -> Iterator[RuleMatch]:
    """Yield a product of sizes that does not divide the ranks."""
    dense = {"TP": sizes.tp, "PP": sizes.pp, "CP": sizes.cp}
    experts = {"ETP": sizes.etp, "EP": sizes.ep, "PP": sizes.pp}
    # Without experts their sizes still make groups of ranks, so both are checked.
    for rule, group, names in (
        ("layout-world-size", dense, (TP, PP, CP)),
        ("layout-expert-ranks", experts, (EP, ETP, PP)),
    ):
        product = math.prod(group.values())
        if start.ranks % product:
            yield RuleMatch(
                rule,
                start.at(*names),
                ranks=start.ranks,
                nodes=start.nodes,
                gpus=start.ranks_per_node,
                product=product_text(group),
            )
            return


def _heads(start: CheckedStart, sizes: ParallelSizes) -> Iterator[RuleMatch]:
    given = start.arguments
    heads = given.number(_HEADS)
    if not heads:
        return
    if heads % sizes.tp:
        yield RuleMatch("layout-heads", start.at(_HEADS), heads=heads, tp=sizes.tp)
    hidden = given.number(_HIDDEN)
    if hidden and hidden % heads and "--kv-channels" not in given:
        yield RuleMatch("layout-head-size", start.at(_HIDDEN), hidden=hidden, heads=heads)
    groups = given.number(_GROUPS) if given.is_on("--group-query-attention") else None
    if groups and groups % sizes.tp and sizes.tp % groups:
        yield RuleMatch("layout-query-groups", start.at(_GROUPS), groups=groups, tp=sizes.tp)


def _experts(start: CheckedStart, sizes: ParallelSizes) -> Iterator[RuleMatch]:
    given = start.arguments
    experts = given.number(EXPERTS)
    if sizes.ep > 1 and EXPERTS not in given and not given.has_any("--spec", "--model-provider"):
        yield RuleMatch("layout-no-experts", start.at(EP), ep=sizes.ep)
    if not experts:
        return
    if experts % sizes.ep:
        yield RuleMatch("layout-experts", start.at(EXPERTS), experts=experts, ep=sizes.ep)
    top = given.number("--moe-router-topk")
    if top and top > experts:
        yield RuleMatch("layout-top-k", start.at("--moe-router-topk"), top=top, experts=experts)
    width = given.number("--moe-ffn-hidden-size") or given.number("--ffn-hidden-size")
    if width and width % sizes.etp:
        where = start.at("--moe-ffn-hidden-size", "--ffn-hidden-size")
        yield RuleMatch("layout-expert-width", where, width=width, etp=sizes.etp)


def _sequences(start: CheckedStart, sizes: ParallelSizes) -> Iterator[RuleMatch]:
    given = start.arguments
    for name in _SEQUENCES:
        length = given.number(name)
        if not length:
            continue
        if sizes.cp > 1 and length % (2 * sizes.cp):
            yield RuleMatch(
                "layout-context", start.at(name), option=name, length=length, cp=sizes.cp
            )
        elif (
            sizes.tp > 1
            and given.is_on("--sequence-parallel")
            and start.mode is CaseMode.PRETRAINING
            and (length // sizes.cp) % sizes.tp
        ):
            part = (
                f"{length}" if sizes.cp == 1 else f"{length} / CP {sizes.cp} = {length // sizes.cp}"
            )
            yield RuleMatch("layout-sequence", start.at(name), option=name, part=part, tp=sizes.tp)


def _batches(start: CheckedStart, sizes: ParallelSizes) -> Iterator[RuleMatch]:
    """Yield a global batch that does not fall into whole micro batches."""
    given = start.arguments
    whole, micro = given.number(_GLOBAL), given.number(_MICRO)
    data = start.ranks // math.prod((sizes.tp, sizes.pp, sizes.cp))
    if start.mode is CaseMode.INFERENCE or given.has_any(*_OTHER_BATCHES) or not whole or not micro:
        return
    if whole % (micro * data):
        where = start.at(_GLOBAL)
        yield RuleMatch(
            "layout-batch", where, whole=whole, micro=micro, data=data, step=micro * data
        )

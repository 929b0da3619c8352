"""Checks of the layout of a case: divisions of ranks, layers, heads, experts and batches. Pure.

The value of CUDA_DEVICE_MAX_CONNECTIONS is checked here as well.

An argument that is not a number, or that comes from a checkpoint, is left alone.

Source: Megatron-LM megatron/training/arguments.py, megatron/core/parallel_state.py,
transformer/transformer_config.py and num_microbatches_calculator.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pytest_megatron.gpu.host import CPU_PLATFORM
from pytest_megatron.workloads.recipe.case import (
    CP,
    EP,
    ETP,
    PP,
    TP,
    Evaluation,
    ModelArgs,
    ParallelSizes,
    Variant,
    WorkloadCase,
    sizes_of,
)
from pytest_megatron.workloads.recipe.model import Workload
from pytest_megatron.workloads.training.checks.rules import RuleMatch
from pytest_megatron.workloads.training.plan.plan import (
    CONNECTIONS_VARIABLE,
    FSDP,
    MOST_CONNECTIONS,
    Connections,
    connections_of,
)

# Arguments that come from elsewhere, so that those of the case say little.
_FROM_ELSEWHERE = ("--use-checkpoint-args", "--yaml-cfg", "--heterogeneous-layers-config-path")


@dataclass(frozen=True, slots=True)
class _CheckedStart:
    """One start of a row's program."""

    workload: Workload
    case: WorkloadCase
    variant: Variant

    @property
    def arguments(self) -> ModelArgs:
        """Arguments of the start."""
        return ModelArgs(self.variant.arguments)

    @property
    def ranks_per_node(self) -> int:
        """`nodes` times that many train together."""
        return self.variant.num_ranks or self.workload.gpus

    @property
    def ranks(self) -> int:
        """Over all nodes."""
        return self.workload.nodes * self.ranks_per_node

    def at(self, *names: str) -> str:
        """Return where one of some arguments stands, else the case."""
        line = self.arguments.line(*names)
        return str(self.case.path) if line is None else f"{self.case.path}:{line}"


def hits_of(workload: Workload, case: WorkloadCase, env: Mapping[str, str]) -> Iterator[RuleMatch]:
    """Yield what is wrong with a row; nothing of a case that is expected to fail.

    Args:
        workload: The row.
        case: The test case of the row.
        env: What the user has set, and a training inherits; the case wins.
    """
    if case.evaluation is Evaluation.XPASS or workload.script is not None:
        return  # a script starts what it wants
    for variant in case.variants:
        if variant.arguments:
            start = _CheckedStart(workload, case, variant)
            yield from _check_layout(start)
            yield from _check_connections(start, env)


def _check_connections(start: _CheckedStart, env: Mapping[str, str]) -> Iterator[RuleMatch]:
    """Yield a value that the training cannot have; the plan sets one that is unset."""
    case, platform = start.case, start.workload.platform
    # A script before the training can change its environment.
    if platform == CPU_PLATFORM or CONNECTIONS_VARIABLE in (case.before_script or ""):
        return
    driver = start.workload.of_driver
    own = {**({} if driver is None else driver.env), **case.env, **start.variant.env}
    value = own.get(CONNECTIONS_VARIABLE, env.get(CONNECTIONS_VARIABLE))
    if value is None:
        return
    where = "the environment"
    if CONNECTIONS_VARIABLE in own:
        line = case.env_lines.get(CONNECTIONS_VARIABLE)
        where = f"{case.path}: ENV_VARS" if line is None else f"{case.path}:{line}"
    if not value.isdecimal() or not 1 <= int(value) <= MOST_CONNECTIONS:
        yield RuleMatch("connections-number", where, value=repr(value))
        return
    given, needs = start.arguments, connections_of(start.arguments, platform)
    if needs is Connections.ONE and value != "1":
        names = {"TP": given.size(TP), "CP": given.size(CP)}
        split = " and ".join(f"{name} {size}" for name, size in names.items() if (size or 1) > 1)
        yield RuleMatch("connections-one", where, value=value, split=split, platform=platform)
    elif needs is Connections.NOT_ONE and value == "1":
        option = next(name for name in FSDP if given.is_on(name))
        yield RuleMatch("connections-fsdp", where, option=option)


def _product_text(sizes: Mapping[str, int]) -> str:
    """Return `TP 2 x PP 4 = 8`; sizes of 1 are left out."""
    shown = {name: size for name, size in sizes.items() if size > 1} or sizes
    product = math.prod(sizes.values())
    return " x ".join(f"{name} {size}" for name, size in shown.items()) + f" = {product}"


_LAYERS = "--num-layers"
# With these, layers are placed by other rules.
_OTHER_LAYOUTS = (
    *("--pipeline-model-parallel-layout", "--hybrid-layer-pattern", "--hybrid-override-pattern"),
    *("--standalone-embedding-stage", "--encoder-num-layers", "--decoder-num-layers"),
    *("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"),
    *("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"),
)
_EXPERTS = "--num-experts"
_HEADS = "--num-attention-heads"


def _check_layout(start: _CheckedStart) -> Iterator[RuleMatch]:
    """Yield sizes that cannot be divided as the arguments demand."""
    sizes = sizes_of(start.arguments)
    if sizes is None or not start.ranks:
        return
    yield from _ranks(start, sizes)
    if not start.arguments.has_any(*_FROM_ELSEWHERE):
        yield from _shares(start, sizes)


def _ranks(start: _CheckedStart, sizes: ParallelSizes) -> Iterator[RuleMatch]:
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
                nodes=start.workload.nodes,
                gpus=start.ranks_per_node,
                product=_product_text(group),
            )
            return


def _shares(start: _CheckedStart, sizes: ParallelSizes) -> Iterator[RuleMatch]:
    """Yield layers, heads and experts that cannot be shared out; building finds all else."""
    given = start.arguments
    layers, heads, experts = (given.number(name) for name in (_LAYERS, _HEADS, _EXPERTS))
    if layers and layers % sizes.pp and not given.has_any(*_OTHER_LAYOUTS):
        yield RuleMatch("layout-layers", start.at(_LAYERS, PP), layers=layers, stages=sizes.pp)
    if heads and heads % sizes.tp:
        yield RuleMatch("layout-heads", start.at(_HEADS), heads=heads, tp=sizes.tp)
    if experts and experts % sizes.ep:
        yield RuleMatch("layout-experts", start.at(_EXPERTS), experts=experts, ep=sizes.ep)

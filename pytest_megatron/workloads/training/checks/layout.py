"""Checks of the layout of a case: divisions of ranks, layers, heads, experts and batches. Pure.

The value of CUDA_DEVICE_MAX_CONNECTIONS is checked here as well.

An argument that is not a number, or that comes from a checkpoint, is left alone.

Source: Megatron-LM megatron/training/arguments.py, megatron/core/parallel_state.py,
transformer/transformer_config.py and num_microbatches_calculator.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pytest_megatron.gpu.host import CPU_PLATFORM
from pytest_megatron.workloads.recipe.case import (
    CP,
    EP,
    ETP,
    PP,
    TP,
    CaseMode,
    Evaluation,
    ModelArgs,
    ParallelSizes,
    WorkloadCase,
    sizes_of,
)
from pytest_megatron.workloads.recipe.model import Workload
from pytest_megatron.workloads.training.checks.rules import RuleMatch
from pytest_megatron.workloads.training.plan.plan import (
    CONNECTIONS_VARIABLE,
    EXPERT_OVERLAP,
    FSDP,
    MOST_CONNECTIONS,
    Connections,
    connections_of,
)

# What a script has in it that runs the case with Megatron-LM's own driver.
_DRIVER = "TRAINING_PARAMS_PATH"
_OWN_RANKS = "GPUS_PER_NODE"
# Arguments that come from elsewhere, so that those of the case say little.
_FROM_ELSEWHERE = ("--use-checkpoint-args", "--yaml-cfg", "--heterogeneous-layers-config-path")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedStart:
    """One start.

    Attributes:
        file: The case.
        ranks_per_node: `nodes` times that many train together.
        env: What the case sets for this start.
        env_lines: Lines of the case that set them.
        scripts: Shell text that runs before the training, and can change its environment.
    """

    file: Path
    arguments: ModelArgs
    nodes: int
    ranks_per_node: int
    platform: str
    mode: CaseMode
    env: Mapping[str, str]
    env_lines: Mapping[str, int] = field(default_factory=dict)
    scripts: str = ""

    @property
    def ranks(self) -> int:
        """Over all nodes."""
        return self.nodes * self.ranks_per_node

    @property
    def has_own_shape(self) -> bool:
        """True if the arguments describe the model, and no checkpoint or other file does."""
        return not self.arguments.has_any(*_FROM_ELSEWHERE)

    def at(self, *names: str) -> str:
        """Return where one of some arguments stands, else the case."""
        line = self.arguments.line(*names)
        return str(self.file) if line is None else f"{self.file}:{line}"

    def at_variable(self, name: str) -> str:
        """Return where a variable is set: the case, or the environment of the user."""
        if name not in self.env:
            return "the environment"
        line = self.env_lines.get(name)
        return f"{self.file}: ENV_VARS" if line is None else f"{self.file}:{line}"


def starts_of(workload: Workload, case: WorkloadCase) -> Iterator[CheckedStart]:
    """Yield what a row starts; nothing of a case that is expected to fail."""
    if case.evaluation is Evaluation.XPASS:
        return
    script = workload.script
    if script is not None and (_DRIVER not in script or _OWN_RANKS in script):
        return  # it starts something else, or on other ranks
    for variant in case.variants:
        if variant.arguments:
            yield CheckedStart(
                file=case.path,
                arguments=ModelArgs(variant.arguments),
                nodes=workload.nodes,
                ranks_per_node=variant.num_ranks or workload.gpus,
                platform=workload.platform,
                mode=case.mode,
                env={**case.env, **variant.env},
                env_lines=case.env_lines,
                scripts=f"{script or ''}\n{case.before_script or ''}",
            )


def check_connections(start: CheckedStart, env: Mapping[str, str]) -> Iterator[RuleMatch]:
    """Yield a value that the training cannot have; the plan sets one that is unset.

    Args:
        start: What is started.
        env: What the user has set; the case wins.
    """
    if start.platform == CPU_PLATFORM or CONNECTIONS_VARIABLE in start.scripts:
        return
    value = start.env.get(CONNECTIONS_VARIABLE, env.get(CONNECTIONS_VARIABLE))
    if value is None:
        return
    where = start.at_variable(CONNECTIONS_VARIABLE)
    if not value.isdecimal() or not 1 <= int(value) <= MOST_CONNECTIONS:
        yield RuleMatch("connections-number", where, value=repr(value))
        return
    given, needs = start.arguments, connections_of(start.arguments, start.platform)
    is_one = int(value) == 1
    if needs is Connections.ONE and value != "1":
        names = {"TP": given.size(TP), "CP": given.size(CP)}
        split = " and ".join(f"{name} {size}" for name, size in names.items() if (size or 1) > 1)
        yield RuleMatch("connections-one", where, value=value, split=split, platform=start.platform)
    elif needs is Connections.NOT_ONE and is_one:
        option = next(name for name in FSDP if given.is_on(name))
        yield RuleMatch("connections-fsdp", where, option=option)
    elif needs is Connections.MANY and is_one:
        yield RuleMatch(
            "connections-overlap", where, option=EXPERT_OVERLAP, platform=start.platform
        )


def product_text(sizes: Mapping[str, int]) -> str:
    """Return `TP 2 x PP 4 = 8`; sizes of 1 are left out."""
    shown = {name: size for name, size in sizes.items() if size > 1} or sizes
    product = math.prod(sizes.values())
    return " x ".join(f"{name} {size}" for name, size in shown.items()) + f" = {product}"


LAYERS = "--num-layers"
_FIRST, _LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
_OF_VIRTUAL = "--num-layers-per-virtual-pipeline-stage"
_NUM_VIRTUAL = "--num-virtual-stages-per-pipeline-rank"
_COUNTED = (
    "--account-for-embedding-in-pipeline-split",
    "--account-for-loss-in-pipeline-split",
)
# With these, layers are placed by other rules.
_OTHER_LAYOUTS = (
    *("--pipeline-model-parallel-layout", "--hybrid-layer-pattern", "--hybrid-override-pattern"),
    *("--standalone-embedding-stage", "--encoder-num-layers", "--decoder-num-layers"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """Distribution of layers over stages.

    Attributes:
        layers: All, with embedding and loss where they count as one.
        middle: Layers that are left for `middle_stages`, those without a number of their own.
        ends: Layers of the first and last stage, where they are given.
    """

    layers: int
    stages: int
    middle: int
    middle_stages: int
    ends: tuple[tuple[str, int], ...]

    @property
    def text(self) -> str:
        """`30 layers`, or what is left of them."""
        if not self.ends:
            return f"{self.layers} layers"
        taken = " - ".join(f"{number} of the {name} stage" for name, number in self.ends)
        return f"{self.layers} layers - {taken} = {self.middle}"


def stages_of(model_args: ModelArgs, sizes: ParallelSizes) -> Stages | None:
    """Return how layers fall on stages; None where other rules place them."""
    layers = model_args.number(LAYERS)
    if not layers or model_args.has_any(*_OTHER_LAYOUTS):
        return None
    layers += sum(model_args.is_on(name) for name in _COUNTED)
    given = (("first", model_args.number(_FIRST)), ("last", model_args.number(_LAST)))
    ends = tuple((name, number) for name, number in given if number is not None)
    return Stages(
        layers=layers,
        stages=sizes.pp,
        middle=layers - sum(number for _, number in ends),
        middle_stages=sizes.pp - len(ends),
        ends=ends,
    )


def check_stages(start: CheckedStart, sizes: ParallelSizes) -> Iterator[RuleMatch]:
    """Yield layers that cannot be split into stages as the arguments demand."""
    given = start.arguments
    found = stages_of(given, sizes)
    if found is None:
        return
    if found.ends and any(given.is_on(name) for name in _COUNTED):
        yield RuleMatch("layout-stage-options", start.at(_FIRST, _LAST))
        return
    wrong = [*_stages(start, found)]
    yield from wrong
    if not wrong:
        yield from _virtual(start, found)


def _stages(start: CheckedStart, found: Stages) -> Iterator[RuleMatch]:
    """Check layers against pipeline stages of different sizes."""
    where = start.at(_FIRST, _LAST, LAYERS, PP)
    if (
        found.middle < 0
        or found.middle_stages < 0
        or bool(found.middle) != bool(found.middle_stages)
    ):
        yield RuleMatch("layout-middle", where, layers=found.text, stages=found.middle_stages)
    elif found.middle_stages and found.middle % found.middle_stages:
        yield RuleMatch("layout-layers", where, layers=found.text, stages=found.middle_stages)


def _virtual(start: CheckedStart, found: Stages) -> Iterator[RuleMatch]:
    """Yield virtual stages that do not divide the layers of a rank."""
    given = start.arguments
    of_one, number = given.number(_OF_VIRTUAL), given.number(_NUM_VIRTUAL)
    if not of_one and not number:
        return
    where = start.at(_OF_VIRTUAL, _NUM_VIRTUAL)
    if of_one and found.ends:
        yield RuleMatch("layout-virtual-uneven", where)
        return
    per_rank = [("a", found.middle // found.middle_stages)] if found.middle_stages else []
    for name, layers in (*per_rank, *(("the " + name, n) for name, n in found.ends)):
        if layers % (number or of_one or 1):
            what = f"{number} virtual stages" if number else f"{of_one} layers to a virtual stage"
            yield RuleMatch("layout-virtual", where, stage=name, layers=layers, what=what)
            return
    num_virtual = number or (found.middle // found.middle_stages) // (of_one or 1)
    least = 3 if given.is_on("--no-overlap-p2p-communication") else 2
    if num_virtual > 1 and found.stages < least:
        yield RuleMatch("layout-virtual-alone", where, stages=found.stages, least=least)


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
    """Yield sizes that cannot be divided as the arguments demand."""
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
    """Check attention heads and query groups against tensor parallelism."""
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
    """Check experts against expert parallelism."""
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
    """Check lengths of sequences against context and tensor parallelism."""
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

"""Whether layers can be divided over pipeline stages, virtual and uneven ones too. Pure.

Source: Megatron-LM megatron/training/arguments.py; megatron/core/transformer/transformer_config.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pytest_megatron.checks.rules import RuleMatch
from pytest_megatron.checks.sizes import PP, ParallelSizes
from pytest_megatron.checks.start import CheckedStart
from pytest_megatron.launch.model_args import ModelArgs

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
    """How layers fall on stages.

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


def stages_of(arguments: ModelArgs, sizes: ParallelSizes) -> Stages | None:
    """Return how layers fall on stages; None where other rules place them."""
    layers = arguments.number(LAYERS)
    if not layers or arguments.has_any(*_OTHER_LAYOUTS):
        return None
    layers += sum(arguments.is_on(name) for name in _COUNTED)
    given = (("first", arguments.number(_FIRST)), ("last", arguments.number(_LAST)))
    ends = tuple((name, number) for name, number in given if number is not None)
    return Stages(
        layers=layers,
        stages=sizes.pp,
        middle=layers - sum(number for _, number in ends),
        middle_stages=sizes.pp - len(ends),
        ends=ends,
    )


def check_stages(start: CheckedStart, sizes: ParallelSizes) -> Iterator[RuleMatch]:
    """Yield layers that do not fall on stages as the arguments say."""
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

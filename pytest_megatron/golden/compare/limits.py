"""The limits of the strict policy, by kind of metric. Pure; numbers only.

A fraction is relative to the golden unless the name says otherwise. The values for a loss, a count
and memory come from the movement of Megatron-LM's own goldens over 238 changes of container: 95 %
of loss curves stay within 2e-3 at every step and within 3e-4 in the mean. Those of a learned band
and of the first steps come from `benchmarks/compare_curves.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from pytest_megatron.golden.model import is_loss

# What a training logs of its model beside the loss; judged without being asked for.
NORMS = ("grad-norm", "params-norm")
TAIL_FRACTION = 0.25
# Absolute: the rounding of a golden of five decimals, and of one of full precision.
ROUNDING, FULL_ROUNDING = 5e-6, 1e-9
# Of a time's repeats; a shared machine has many, a quiet one hardly any.
TIME_SPREADS = 3.0
FULL_PRECISION = "fp32"
_FLOORS: Mapping[str, float] = {FULL_PRECISION: 2e-5, "bf16": 2e-4, "fp16": 1e-4}
_FLOOR = 1e-4  # of a precision that is not known
# More steps than that of a golden without a band of its own are judged by windows.
LONG_STEPS = 200
NUM_WINDOWS, LEAST_WINDOW_STEPS = 20, 20
# A step outside the band is off by so many times what most of its neighbours are off by, at most.
NEIGHBOURS, NEIGHBOUR_PART, NEIGHBOUR_FACTOR = 8, 0.75, 8.0
# Of a count, the part of the steps at either end that its mean leaves out, by how far they are off;
# the mean of all steps may be off by so many times as much.
TRIMMED_FRACTION, UNTRIMMED_FACTOR = 0.2, 3.0


class LimitKind(Enum):
    """Kinds of metrics; each kind has its own layers."""

    LOSS = "loss"
    COUNT = "count"
    COST = "cost"
    MEMORY = "memory"


class Worse(Enum):
    """The side of the golden on which a run is worse; it fails only there."""

    HIGHER = "higher"
    LOWER = "lower"
    EITHER = "either"


_BETTER: Mapping[Worse, str] = {
    Worse.HIGHER: "lower_is_better",
    Worse.LOWER: "higher_is_better",
    Worse.EITHER: "either",
}


class Exact(Enum):
    """Conditions under which every value must equal the golden bit for bit."""

    AUTO = "auto"  # the golden is deterministic, and the run has its image, versions and host
    ALWAYS = "always"
    NEVER = "never"


@dataclass(frozen=True, slots=True, kw_only=True)
class LossLimits:
    """Limits of a loss, and of every metric of no other kind.

    Attributes:
        exact: When every bit counts.
        step_1: Of the first step, which has seen no update.
        early_steps: How many steps are the early window, where no step may be outside.
        early_band: There, of a golden without a band of its own.
        band: Of every step of a golden without a band of its own.
        floor: The narrowest band that is learned; by precision where it is None.
        learned_floor: The same where the repeats were on the run's own platform, whose noise they
            know.
        absolute: Added to every band, in the metric's own unit.
        outside_fraction: Of the steps, how many may be outside the band.
        outside_factor: How many bands such a step may be off.
        mean: Of all steps.
        tail_mean: Of the last quarter.
        window_mean: Of each of the windows that the steps are cut into; None for no windows.
        frozen_steps: From how many steps without a change on a curve is frozen.
        frozen_fraction: The same as a part of all steps; the larger counts.
    """

    exact: Exact = Exact.AUTO
    step_1: float = 1e-3
    early_steps: int = 10
    early_band: float = 1e-3
    band: float = 2e-3
    floor: float | None = None
    learned_floor: float = 2e-5
    absolute: float = 0.0
    outside_fraction: float = 0.02
    outside_factor: float = 5.0
    mean: float = 3e-4
    tail_mean: float = 5e-4
    window_mean: float | None = None
    frozen_steps: int = 5
    frozen_fraction: float = 0.1

    def fixed_at(self, step: int) -> float:
        """Return the band of a step of a golden without a band of its own."""
        return min(self.early_band, self.band) if step <= self.early_steps else self.band

    def floor_in(self, precision: str | None, *, is_at_home: bool = False) -> float:
        """Return the narrowest band of a model that computes in `precision`.

        Args:
            precision: That of the golden, or None.
            is_at_home: Whether repeats on the platform of the run taught the band.
        """
        if is_at_home:
            return self.learned_floor
        return _FLOORS.get(precision or "", _FLOOR) if self.floor is None else self.floor


@dataclass(frozen=True, slots=True, kw_only=True)
class CountLimits:
    """Limits of a count, such as num-zeros; single steps are not compared.

    Attributes:
        exact: As for a loss.
        mean: Of the mean without the steps that differ most, either way (`TRIMMED_FRACTION`).
        tail_mean: The same of the last quarter.
        absolute: In counts; less than this is no difference.
    """

    exact: Exact = Exact.AUTO
    mean: float = 0.085
    tail_mean: float = 0.12
    median: float = 0.15
    absolute: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CostLimits:
    """Limits of a time or a rate, compared on the golden's class of host only.

    Attributes:
        median: Of the steps after the warm-up.
        quartile: Of their slowest quarter's border, so that slow steps do not hide.
        warm_up: Part of the steps that is left out at the start.
        worse: The side that fails.
    """

    median: float = 0.10
    quartile: float = 0.25
    warm_up: float = 0.1
    worse: Worse = Worse.HIGHER


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimits:
    """Limits of memory, compared on the golden's class of host only."""

    peak: float = 0.01
    median: float = 0.01
    worse: Worse = Worse.HIGHER


Limits: TypeAlias = LossLimits | CountLimits | CostLimits | MemoryLimits

# A metric that is computed from the schedule alone, and one that varies more than a loss does.
_SCHEDULE = LossLimits(
    step_1=1e-6,
    early_band=1e-6,
    band=1e-6,
    floor=1e-6,
    learned_floor=1e-6,
    mean=1e-6,
    tail_mean=1e-6,
)
_NORM = LossLimits(
    step_1=5e-3,
    early_band=1e-2,
    band=2e-2,
    floor=1e-3,
    outside_factor=10.0,
    mean=5e-3,
    tail_mean=5e-3,
)
# The parameters add up what the steps did, so that their norm drifts and is off in the mean by as
# much as at single steps (`benchmarks/compare_norms.py`).
_PARAMETERS = LossLimits(mean=1e-3, tail_mean=2e-3)
DEFAULTS: Mapping[str, Limits] = {
    "grad-norm": _NORM,
    "params-norm": _PARAMETERS,
    "learning-rate": _SCHEDULE,
    "num-zeros": CountLimits(),
    "iteration-time": CostLimits(),
    "throughput": CostLimits(worse=Worse.LOWER),
    "mem-allocated-bytes": MemoryLimits(),
    "mem-max-allocated-bytes": MemoryLimits(),
}
# A long training is chaotic: its single steps part by percents while its windows stay together.
_LONG = LossLimits(band=3e-2, mean=1e-3, tail_mean=2.5e-3, window_mean=5e-3)
_SAME_IF_LONG = DEFAULTS.keys() - {"params-norm"}
BY_KIND: Mapping[LimitKind, Limits] = {
    LimitKind.LOSS: LossLimits(),
    LimitKind.COUNT: CountLimits(),
    LimitKind.COST: CostLimits(),
    LimitKind.MEMORY: MemoryLimits(),
}


def limits_of(metric: str, *, is_long: bool = False) -> Limits:
    """Return the limits of a metric; `is_long` for a long golden without a band of its own."""
    if is_long and metric not in _SAME_IF_LONG:
        return _LONG
    return DEFAULTS.get(metric, BY_KIND[LimitKind.LOSS])


def kind_of(metric: str) -> LimitKind:
    """Return the kind of a metric by its name."""
    limits = limits_of(metric)
    return next(kind for kind, one in BY_KIND.items() if type(one) is type(limits))


def direction_of(metric: str) -> str:
    """Return the direction in which a metric improves, as provenance names it.

    Less of a loss is better, although both sides of the golden fail; of other metrics nothing is
    known.
    """
    limits = DEFAULTS.get(metric)
    if isinstance(limits, CostLimits | MemoryLimits):
        return _BETTER[limits.worse]
    return _BETTER[Worse.HIGHER if is_loss(metric) else Worse.EITHER]


@dataclass(frozen=True, slots=True, kw_only=True)
class Learning:
    """Settings for learning a band from repeats.

    Attributes:
        least_repeats: Fewer give no band of their own; their spread only widens the fixed one.
        few_factor: By how many of their standard deviations.
        look_back_steps: The estimate of a step is the largest of so many values up to there ...
        look_ahead_steps: ... and of those up to so many steps later: where noise grows, that of
            another platform, which begins a little larger, is a few steps ahead.
        mean_fraction: The limit of the mean, as a part of the limit of single steps.
        tail_fraction: The same of the mean of the last quarter.
        least_steps_for_means: Fewer steps have no mean worth judging.
    """

    least_repeats: int = 3
    few_factor: float = 4.0
    look_back_steps: int = 8
    look_ahead_steps: int = 2
    mean_fraction: float = 0.3
    tail_fraction: float = 0.4
    least_steps_for_means: int = 8


LEARNING = Learning()

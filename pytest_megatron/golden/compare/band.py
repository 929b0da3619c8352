"""The band around a golden: the deviation allowed at each step. Pure; numbers only.

Two sources: the golden itself (deterministic or not, its precision), and the spread of its repeats,
which is in its provenance. Run-to-run noise of a training grows over the
steps, from nothing at step 1, so a learned band is narrow where bugs show first.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass

from pytest_megatron.golden.compare.environment import NOWHERE, RunEnvironment, drift_between
from pytest_megatron.golden.compare.limits import (
    FULL_PRECISION,
    FULL_ROUNDING,
    LEARNING,
    ROUNDING,
    TAIL_FRACTION,
    Learning,
    LossLimits,
)
from pytest_megatron.golden.compare.result import Allowed, allowed_of
from pytest_megatron.golden.model import Series
from pytest_megatron.golden.provenance import Golden, Provenance, Spread

# Two-sided quantile of Student's t at p = 1e-3, by degrees of freedom.
_T_DEGREES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 15, 20, 30, 60, 1000)
_T_QUANTILES = (
    *(636.619, 31.599, 12.924, 8.610, 6.869, 5.959, 5.408, 5.041),
    *(4.781, 4.587, 4.318, 4.073, 3.850, 3.646, 3.460, 3.300),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """The deviations allowed around a golden.

    Attributes:
        steps: (num_steps,) the golden's.
        allowed: (num_steps,) absolute deviation allowed at each: `widths` of the golden's
            value, and `rounding`.
        num_outside: How many steps may be outside, each by `LossLimits.outside_factor` at most.
        needs_company: True if such a step must have neighbours that are off too, since the
            noise is not known.
        bias: Absolute deviation allowed of the mean over all steps.
        tail: The same over the last steps (`TAIL_FRACTION`).
        note: Why the band is as it is, for the message.
    """

    steps: tuple[int, ...]
    allowed: tuple[float, ...]
    widths: tuple[float, ...]
    rounding: float
    num_outside: int
    needs_company: bool
    bias: float
    tail: float
    note: str

    @property
    def as_allowed(self) -> Allowed:
        """The same in few numbers: a width holds for many steps."""
        return allowed_of(dict(zip(self.steps, self.widths, strict=True)), self.rounding)


@dataclass(frozen=True, slots=True, kw_only=True)
class Knowledge:
    """The known noise of one metric.

    Attributes:
        is_deterministic: Repeats agreed bit for bit, on a platform like the run's.
        is_learned: There were repeats enough to learn it from.
        is_elsewhere: The run is on another platform, where fewer digits are the same.
        is_at_home: It is on the same one, for certain.
    """

    is_deterministic: bool
    is_learned: bool
    is_elsewhere: bool
    is_at_home: bool

    @property
    def is_narrow(self) -> bool:
        """True if the metric has a band of its own."""
        return (self.is_deterministic or self.is_learned) and not self.is_elsewhere


def knowledge_of(
    golden: Golden, metric: str, *, nondeterministic: bool, surroundings: RunEnvironment = NOWHERE
) -> Knowledge:
    """Return the noise of one metric as a golden describes it, for a run in these surroundings."""
    made = golden.provenance or Provenance()
    drift = drift_between(golden.provenance, surroundings)
    is_elsewhere = bool(drift.changes) and made.precision != FULL_PRECISION
    is_equal = made.deterministic is True and made.spread.get(metric, 0.0) == 0.0
    return Knowledge(
        is_deterministic=is_equal and not nondeterministic and not is_elsewhere,
        is_learned=metric in made.spread and (made.repeats or 1) >= LEARNING.least_repeats,
        is_elsewhere=is_elsewhere,
        is_at_home=drift.is_same_platform,
    )


def band_around(
    golden: Golden,
    metric: str,
    series: Series,
    known: Knowledge,
    limits: LossLimits,
) -> Band:
    """Return the band of one metric, whose golden values must all be finite numbers.

    The spread of repeats holds for their platform. Another one rounds differently: in fp32 by 2e-7
    at most in 50 steps, which any band forgives; in bf16 by 2e-4 (two kinds of CPU, one training),
    so that there the band is at least that of a golden without repeats.
    """
    made = golden.provenance or Provenance()
    repeats = 1 if made.repeats is None else made.repeats
    factor = prediction_factor(repeats) if known.is_learned else LEARNING.few_factor
    learned = [factor * sd for sd in growing_deviation(made.spread.get(metric), series.steps)]
    floor = limits.floor_in(made.precision, is_at_home=known.is_learned and known.is_at_home)
    fixed = [floor if known.is_narrow else limits.fixed_at(step) for step in series.steps]
    rounding = limits.absolute + (FULL_ROUNDING if series.is_full_precision else ROUNDING)
    scales = [abs(v) for v in series.values if isinstance(v, float)]
    widths = tuple(map(max, learned, fixed))
    allowed = [width * scale + rounding for width, scale in zip(widths, scales, strict=True)]
    noise = [width * scale for width, scale in zip(learned, scales, strict=True)]
    of_tail = slice(len(scales) - tail_length(len(scales)), None)
    mean, tail = (
        max(limit * math.fsum(scale), part * math.fsum(width)) / len(scale)
        for limit, part, width, scale in (
            (limits.mean, LEARNING.mean_fraction, noise, scales),
            (limits.tail_mean, LEARNING.tail_fraction, noise[of_tail], scales[of_tail]),
        )
    )
    return Band(
        steps=series.steps,
        allowed=tuple(allowed),
        widths=widths,
        rounding=rounding,
        num_outside=0 if known.is_deterministic else int(limits.outside_fraction * len(scales)),
        needs_company=not (known.is_learned or known.is_deterministic),
        bias=mean + limits.absolute + ROUNDING,
        tail=tail + limits.absolute + ROUNDING,
        note=_describe(repeats, known),
    )


def prediction_factor(repeats: int) -> float:
    """Return by how many sample standard deviations of `repeats` runs another run may be off.

    Student's t at p = 1e-3 with repeats - 1 degrees of freedom, times sqrt(1 + 1/repeats): the
    golden is the mean of the repeats or one of them, and the new run varies too.
    """
    at = bisect_right(_T_DEGREES, repeats - 1) - 1
    return _T_QUANTILES[at] * math.sqrt(1 + 1 / repeats)


def growing_deviation(
    spread: Spread | None, steps: tuple[int, ...], learning: Learning = LEARNING
) -> list[float]:
    """Return the relative standard deviation to use at each step.

    At a step it is the largest of the values around it: the estimate of one step from a few repeats
    may be near 0 by chance. Steps that the spread lacks have the last.
    """
    if spread is None:
        return [0.0] * len(steps)
    if isinstance(spread, float):
        return [spread] * len(steps)
    known = [v for v in spread.values if isinstance(v, float)]
    deviations = []
    for step in steps:
        first = max(0, bisect_right(spread.steps, step) - learning.look_back_steps)
        around = known[first : bisect_right(spread.steps, step + learning.look_ahead_steps)]
        deviations.append(max(around, default=0.0))
    return deviations


def tail_length(num_steps: int) -> int:
    """Return how many of the last steps the tail has."""
    return max(1, int(num_steps * TAIL_FRACTION))


def _describe(repeats: int, known: Knowledge) -> str:
    if known.is_elsewhere:
        return "golden from another platform, where fewer digits are the same"
    if known.is_deterministic:
        return "golden is deterministic"
    if known.is_learned:
        return f"band learned from {repeats} repeats"
    return "golden without repeats enough for a band of its own"

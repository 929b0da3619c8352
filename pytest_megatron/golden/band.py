"""How far from its golden a loss may be, step by step. Pure; numbers only.

Two sources: what is known of the golden (deterministic or not, which precision), and what was
learned from repeats, the spread in its provenance. Run-to-run noise of a training grows over the
steps, from nothing at step 1, so a learned band is narrow where bugs show first.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass

from pytest_megatron.golden.model import Series
from pytest_megatron.golden.provenance import Golden, Spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """Every number of the strict policy; relative to the golden unless the name says otherwise.

    The values for a loss, num-zeros and memory come from the movement of Megatron-LM's own
    goldens over 238 changes of container (JUDGING 1.2): 95 % of loss curves stay within 2e-3 at
    every step and within 3e-4 in the mean.
    """

    # Loss, every step.
    deterministic_band: float = 1e-4
    band: float = 2e-3
    outside_fraction: float = 0.02
    outside_factor: float = 10.0
    step_1: float = 1e-3
    # Loss, over many steps.
    bias: float = 3e-4
    tail: float = 5e-4
    least_steps_for_means: int = 8
    # Loss, a learned band.
    least_repeats: int = 3
    few_repeats_factor: float = 4.0
    look_back_steps: int = 8
    # Of the mean band, where the band was learned and is wider than `bias` and `tail`.
    learned_mean_fraction: float = 0.5
    # Loss, a frozen curve.
    least_frozen_steps: int = 5
    frozen_fraction: float = 0.1
    # Absolute: the rounding of a golden of five decimals, and of one of full precision.
    rounding: float = 5e-6
    full_rounding: float = 1e-9
    # num-zeros; never by step. `zeros_absolute` counts.
    zeros_mean: float = 0.08
    zeros_tail: float = 0.12
    zeros_median: float = 0.12
    zeros_absolute: float = 1.0
    # Time and memory, only upwards.
    time_median: float = 0.10
    warm_up_fraction: float = 0.1
    memory: float = 0.01
    tail_fraction: float = 0.25


THRESHOLDS = Thresholds()
REDUCED_PRECISIONS = ("bf16", "fp16")

# Two-sided quantile of Student's t at p = 1e-3, by degrees of freedom.
_T_DEGREES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 15, 20, 30, 60, 1000)
_T_QUANTILES = (
    *(636.619, 31.599, 12.924, 8.610, 6.869, 5.959, 5.408, 5.041),
    *(4.781, 4.587, 4.318, 4.073, 3.850, 3.646, 3.460, 3.300),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """What a loss may do around its golden.

    Attributes:
        steps: (num_steps,) the golden's.
        allowed: (num_steps,) absolute deviation allowed at each.
        num_outside: How many steps may be outside, each by `Thresholds.outside_factor` at most.
        bias: Absolute deviation allowed of the mean over all steps.
        tail: The same over the last steps (`Thresholds.tail_fraction`).
        note: Why the band is as it is, for the message.
    """

    steps: tuple[int, ...]
    allowed: tuple[float, ...]
    num_outside: int
    bias: float
    tail: float
    note: str


def band_around(
    golden: Golden,
    metric: str,
    series: Series,
    *,
    nondeterministic: bool,
    host_class: str | None = None,
) -> Band:
    """Return the band of one metric, whose golden values must all be finite numbers.

    What repeats say holds for their class of host. Elsewhere other instructions round otherwise:
    in fp32 by 2e-7 at most in 50 steps, which any band forgives; in bf16 by 2e-4 (two kinds of
    CPU, one training), so that there the golden counts as one without repeats.
    """
    limits = THRESHOLDS
    provenance = golden.provenance
    is_rounded_otherwise = (
        provenance is not None
        and provenance.precision in REDUCED_PRECISIONS
        and None not in (host_class, provenance.host_class)
        and host_class != provenance.host_class
    )
    is_deterministic = (
        provenance is not None
        and provenance.deterministic is True
        and not nondeterministic
        and not is_rounded_otherwise
    )
    repeats = 1 if provenance is None or provenance.repeats is None else provenance.repeats
    spread = None if provenance is None else provenance.spread.get(metric)
    is_learned = spread is not None and repeats >= limits.least_repeats and not is_rounded_otherwise
    floor = limits.deterministic_band if is_deterministic or is_learned else limits.band
    factor = prediction_factor(repeats) if is_learned else limits.few_repeats_factor
    deviations = growing_deviation(spread, series.steps, limits.look_back_steps)
    rounding = limits.full_rounding if series.is_full_precision else limits.rounding
    scales = [abs(v) for v in series.values if isinstance(v, float)]
    widths = [max(floor, factor * sd) for sd in deviations]
    allowed = [w * scale + rounding for w, scale in zip(widths, scales, strict=True)]
    first_of_tail = len(scales) - tail_length(len(scales))
    return Band(
        steps=series.steps,
        allowed=tuple(allowed),
        num_outside=0 if is_deterministic else int(limits.outside_fraction * len(scales)),
        bias=_mean_limit(limits.bias, allowed, scales, is_learned=spread is not None),
        tail=_mean_limit(
            limits.tail,
            allowed[first_of_tail:],
            scales[first_of_tail:],
            is_learned=spread is not None,
        ),
        note="golden of reduced precision from another class of host"
        if is_rounded_otherwise
        else _describe(repeats, is_deterministic=is_deterministic, is_learned=is_learned),
    )


def prediction_factor(repeats: int) -> float:
    """Return by how many sample standard deviations of `repeats` runs another run may be off.

    Student's t at p = 1e-3 with repeats - 1 degrees of freedom, times sqrt(1 + 1/repeats): the
    golden is the mean of the repeats or one of them, and the new run varies too.
    """
    at = bisect_right(_T_DEGREES, repeats - 1) - 1
    return _T_QUANTILES[at] * math.sqrt(1 + 1 / repeats)


def growing_deviation(
    spread: Spread | None, steps: tuple[int, ...], look_back_steps: int
) -> list[float]:
    """Return the relative standard deviation to use at each step.

    At a step it is the largest of the `look_back_steps` values up to there: the estimate of one
    step from a few repeats may be near 0 by chance. Steps that the spread lacks have the last.
    """
    if spread is None:
        return [0.0] * len(steps)
    if isinstance(spread, float):
        return [spread] * len(steps)
    known = [v for v in spread.values if isinstance(v, float)]
    deviations = []
    for step in steps:
        end = bisect_right(spread.steps, step)
        recent = known[max(0, end - look_back_steps) : end]
        deviations.append(max(recent, default=0.0))
    return deviations


def tail_length(num_steps: int) -> int:
    """Return how many of the last steps the tail has."""
    return max(1, int(num_steps * THRESHOLDS.tail_fraction))


def _mean_limit(
    limit: float, allowed: list[float], scales: list[float], *, is_learned: bool
) -> float:
    """Return the absolute deviation that the mean over some steps may have."""
    fixed = limit * math.fsum(scales) / len(scales)
    if not is_learned:
        return fixed + THRESHOLDS.rounding
    mean_allowed = math.fsum(allowed) / len(allowed)
    return max(fixed, THRESHOLDS.learned_mean_fraction * mean_allowed)


def _describe(repeats: int, *, is_deterministic: bool, is_learned: bool) -> str:
    if is_deterministic:
        return "golden is deterministic"
    if is_learned:
        return f"band learned from {repeats} repeats"
    return "golden without repeats enough for a band of its own"

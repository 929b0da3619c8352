"""The answer of a comparison for one metric: data, text, JSON. Decides nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from pytest_megatron.base.files import JsonValue
from pytest_megatron.base.text import counted, grouped, none_or
from pytest_megatron.runs.record import (
    RELATIVE,
    Deviation,
    RecordedBand,
    RecordedLayer,
    RecordedMetric,
    to_json,
)
from pytest_megatron.workloads.golden.model import Value
from pytest_megatron.workloads.golden.policy import Worse


class ComparisonRule(Enum):
    """Rules that can decide a comparison."""

    # Both policies.
    NO_GOLDEN = "metric not in the golden"
    NO_METRIC = "metric not in the run"
    NO_REQUEST = "requests differ"
    # strict, in the order in which they are tried.
    GOLDEN_UNUSABLE = "golden unusable"
    TRUNCATED = "truncated"
    MISSING = "missing"
    NAN = "nan"
    INF = "inf"
    TEXT = "text"
    PRESENCE = "presence"
    NOT_JUDGED = "not judged"
    BITWISE = "bitwise equal"
    EXACT = "exact"
    STEP_1 = "step 1"
    FROZEN = "frozen"
    EARLY = "early window"
    BAND = "band"
    OUTLIER = "outlier"
    BIAS = "mean"
    TAIL = "tail mean"
    WINDOW = "window mean"
    MEDIAN = "median"
    QUARTILE = "upper quartile"
    PEAK = "peak"
    # Passed by every layer, and yet not equal: for which reason.
    DRIFT = "platform drift"
    # Between checkpoints, whatever the policy.
    GRADIENT = "norm of the difference"
    NOT_FINITE = "not finite"
    SHAPE = "shape"
    # megatron, beside `exact`.
    APPROXIMATE = "approximate"
    UNKNOWN = "unknown metric"


_FAULTS_OF_GOLDEN = frozenset(
    {ComparisonRule.NO_GOLDEN, ComparisonRule.GOLDEN_UNUSABLE, ComparisonRule.UNKNOWN}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDifference:
    """One step at which run and golden differ.

    Attributes:
        observed: None if the run has no value there.
        tolerance: The allowed deviation there, relative to the golden; None if it names no amount.
        place: Name of the place where it is no step of a training, as in `request '0', token 7`.
    """

    step: int
    observed: Value | None
    golden: Value
    tolerance: float | None = None
    place: str | None = None

    @property
    def where(self) -> str:
        """The name of the place, for messages."""
        return self.place or f"step {self.step}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesSummary:
    """One number made of many steps, of the run and of the golden.

    Attributes:
        name: Which, as in `median of steps 11 to 100`.
        tolerance: The allowed deviation, relative to the golden.
    """

    name: str
    observed: float
    golden: float
    tolerance: float


def layer_text(layer: RecordedLayer) -> str:
    """Return the result of a layer as text, without numbers where one is not known."""
    measured, limit, unit = layer.measured, layer.limit, layer.unit
    where = "" if layer.place is None else f" ({layer.place})"
    if measured is None or limit is None:
        return f"{layer.layer}{where}"
    if unit == RELATIVE:
        return f"{layer.layer} {' of '.join(_told_apart(measured, limit, 1, 'e'))}{where}"
    if unit.startswith(("steps ", "requests ")):  # so many that differ, of which so many may
        thing, what = unit.split(" ")
        told = f"{counted(int(measured), thing.removesuffix('s'))} {what}"
        may = "may be" if what == "outside" else "may"
        return f"{layer.layer} {told}, {none_or(limit)} {may}{where}"
    return f"{layer.layer} {' of '.join(_told_apart(measured, limit, 6, 'g'))} {unit}{where}"


def _told_apart(first: float, second: float, digits: int, style: str) -> tuple[str, str]:
    """Return two numbers as texts, with as many more digits as differing ones need to differ."""
    for more in range(digits, 18):
        texts = f"{first:.{more}{style}}", f"{second:.{more}{style}}"
        if texts[0] != texts[1]:
            return texts
    return f"{first:.{digits}{style}}", f"{second:.{digits}{style}}"


def counting_layer(
    rule: ComparisonRule, count: int, limit: int, unit: str, place: str | None = None
) -> RecordedLayer:
    """Return a layer that counts something of which no more than `limit` may be."""
    return RecordedLayer(
        layer=rule.value,
        passed=count <= limit,
        measured=float(count),
        limit=float(limit),
        unit=unit,
        place=place,
    )


def summary_layer(rule: ComparisonRule, summary: SeriesSummary, *, passed: bool) -> RecordedLayer:
    """Return a layer that compares one number made of many steps."""
    return RecordedLayer(
        layer=rule.value,
        passed=passed,
        measured=relative(summary.observed, summary.golden),
        limit=summary.tolerance,
        place=summary.name.partition(" of ")[2] or None,
    )


def is_within(summary: SeriesSummary, worse: Worse) -> bool:
    """Return True if a number is within its tolerance on the side where it is worse."""
    off = relative(summary.observed, summary.golden)
    is_too_high = off > summary.tolerance and worse is not Worse.LOWER
    is_too_low = off < -summary.tolerance and worse is not Worse.HIGHER
    return not (is_too_high or is_too_low)


def band_of(widths: Mapping[int, float], absolute: float = 0.0) -> RecordedBand:
    """Return the distance allowed around a golden: the widths of ascending steps, merged."""
    kept: dict[str, float] = {}
    last = None
    for step, width in widths.items():
        if width != last:
            kept[str(step)] = last = width
    return RecordedBand(relative=dict(kept), absolute=absolute)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The answer for one metric.

    Attributes:
        rule: The rule that decided it.
        golden_path: The golden's file, for the message.
        first: The first step outside the tolerance; if there is none, the first that differs.
        summary: The number that decided, where it was no single step.
        notes: Further facts, each a clause without a final period.
        unit: Unit of the count in `deviation`.
        allowed: Around each value of the golden; None where no step has a limit of its own.
        layers: Every test that was applied, in order; after one that failed the others are
            measured too, as far as there is something to measure.
    """

    metric: str
    passed: bool
    rule: ComparisonRule
    golden_path: str
    first: StepDifference | None = None
    summary: SeriesSummary | None = None
    deviation: Deviation = field(default_factory=Deviation)
    notes: tuple[str, ...] = ()
    unit: str = "steps"
    layers: tuple[RecordedLayer, ...] = ()
    allowed: RecordedBand | None = None

    @property
    def is_judged(self) -> bool:
        """True if the values were compared, not only their presence."""
        return self.rule is not ComparisonRule.NOT_JUDGED

    @property
    def is_golden_to_blame(self) -> bool:
        """True if it failed whatever the run measured."""
        return not self.passed and self.rule in _FAULTS_OF_GOLDEN


def unjudged(comparison: Comparison, note: str) -> Comparison:
    """Return a comparison that passes unseen, with the reason."""
    return replace(comparison, passed=True, rule=ComparisonRule.NOT_JUDGED, notes=(note,))


def render(comparison: Comparison) -> str:
    """Return one line of text: observed and allowed values, the deviation and the file."""
    parts = [_headline(comparison), *comparison.notes]
    if comparison.first is not None and (comparison.passed or comparison.summary is not None):
        parts.append(f"first differs at {comparison.first.where}")
    deviation = comparison.deviation
    if deviation.worst_step is not None:
        parts.append(
            f"largest {deviation.largest_relative:.1e} at step {deviation.worst_step}, "
            f"mean signed {deviation.mean_signed_relative:+.1e} over "
            f"{counted(deviation.num_compared, 'step')}"
        )
    return "; ".join([*parts, comparison.golden_path])


def name_unjudged(comparisons: Iterable[Comparison]) -> str:
    """Return `2 not judged: a, b (why)`, each reason once; empty if all were judged."""
    reasons = grouped(("; ".join(c.notes), c.metric) for c in comparisons if not c.is_judged)
    texts = [f"{', '.join(names)} ({why})" for why, names in reasons.items()]
    num = sum(map(len, reasons.values()))
    return f"{num} not judged: {', '.join(texts)}" if texts else ""


def render_layers(comparison: Comparison) -> list[str]:
    """Return a line on the layers that failed and one on the others, with measured values.

    Without layers, and where run and golden are equal, there are no lines.
    """
    if comparison.rule is ComparisonRule.BITWISE:
        return []
    texts: dict[str, list[str]] = {"failed": [], "passed": []}
    for layer in comparison.layers:
        texts["passed" if layer.passed else "failed"].append(layer_text(layer))
    return [f"{word}: {', '.join(found)}" for word, found in texts.items() if found]


def comparisons_to_json(comparisons: Iterable[Comparison], policy: str) -> dict[str, JsonValue]:
    """Return the content of `comparison.json`; numbers that are not finite are texts."""
    answers = list(comparisons)
    return {
        "passed": all(c.passed for c in answers),
        "policy": policy,
        "comparisons": [to_json(recorded(c)) for c in answers],
    }


def recorded(comparison: Comparison) -> RecordedMetric:
    """Return one comparison as `comparison.json` has it, flat.

    `observed`, `golden` and `tolerance` are those of the summary that decided, else of
    `first_step`; an observed value that the run does not have is None.
    """
    first, summary = comparison.first, comparison.summary
    decisive = first if summary is None else summary
    return RecordedMetric(
        metric=comparison.metric,
        passed=comparison.passed,
        rule=comparison.rule.value,
        judged=comparison.is_judged,
        first_step=None if first is None else first.step,
        first_place=None if first is None else first.where,
        summary=None if summary is None else summary.name,
        observed=None if decisive is None else decisive.observed,
        golden=None if decisive is None else decisive.golden,
        tolerance=None if decisive is None else decisive.tolerance,
        **vars(comparison.deviation),
        notes=comparison.notes,
        allowed=comparison.allowed,
        layers=comparison.layers,
        golden_path=comparison.golden_path,
        text=render(comparison),
    )


def relative(observed: float, golden: float) -> float:
    """Return (observed - golden) / |golden|; over a golden of 0 it is 0 or infinite."""
    if observed == golden:
        return 0.0
    if golden == 0:
        return math.copysign(math.inf, observed)
    return (observed - golden) / abs(golden)


def part_of(allowed: float, golden: float) -> float:
    """Return what is allowed as a part of the golden; infinite where that is 0."""
    return allowed / abs(golden) if golden else math.inf


def _headline(comparison: Comparison) -> str:
    """Return the first part of a comparison's line: metric, step, values."""
    metric, rule = comparison.metric, comparison.rule
    if comparison.passed:
        word = "passed" if comparison.is_judged else rule.value
        return f"{metric}: {word}, {comparison.deviation.num_compared} {comparison.unit}"
    if comparison.summary is not None:
        s = comparison.summary
        return (
            f"{metric}, {s.name}: observed {s.observed:.6g}, golden {s.golden:.6g}, "
            f"{_off(relative(s.observed, s.golden), s.tolerance, sign='+')}"
        )
    if comparison.first is not None and rule is not ComparisonRule.FROZEN:
        return f"{metric}, {comparison.first.where}: {_at_step(comparison.first, rule)}"
    return f"{metric}: {rule.value}"


def _at_step(first: StepDifference, rule: ComparisonRule) -> str:
    """Describe what was observed and expected at a step."""
    observed, golden = first.observed, first.golden
    expected = f"golden {_number(golden)}"
    if rule is ComparisonRule.GOLDEN_UNUSABLE:
        return f"golden unusable, it has {_number(golden)} here"
    if observed is None:
        return f"missing in the run, {expected}"
    if isinstance(observed, str) or isinstance(golden, str) or first.place is not None:
        return f"observed {_number(observed)}, {expected}"
    off = relative(observed, golden)
    tolerance = first.tolerance if math.isfinite(observed) else None
    amount = f", {_off(abs(off), tolerance)}" if math.isfinite(off) else ""
    texts = _number(observed), _number(golden)
    if texts[0] == texts[1]:
        texts = _told_apart(observed, golden, 7, "g")
    return f"observed {texts[0]}, golden {texts[1]}{amount}"


def _off(amount: float, tolerance: float | None, sign: str = "") -> str:
    """Return how far a value is off, and how far it may be, in digits that tell them apart."""
    if tolerance is None:
        return f"off by {amount:{sign}.1e} relative"
    size, limit = _told_apart(abs(amount), tolerance, 1, "e")
    minus = "-" if amount < 0 else sign
    return f"off by {minus}{size} relative, tolerance allows {limit}"


def _number(value: Value) -> str:
    """Return a value as text: seven digits, whole numbers in full, text quoted."""
    if isinstance(value, str):
        return f"the text {value!r}"
    if math.isfinite(value) and value.is_integer() and abs(value) < 1 << 53:
        return str(int(value))
    return f"{value:.7g}"

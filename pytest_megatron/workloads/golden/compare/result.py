"""Deviations of a run from its golden, and the answer for one metric: data, text, JSON. Pure.

Decides nothing.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import groupby

from pytest_megatron.base.files import JsonValue
from pytest_megatron.base.text import counted, grouped, none_or
from pytest_megatron.runs.record import (
    RELATIVE,
    Deviation,
    LayerResult,
    RecordedBand,
    RecordedLayer,
    RecordedMetric,
    to_json,
)
from pytest_megatron.workloads.golden.model import (
    Series,
    Value,
    is_finite,
    step_interval,
    to_float32,
)


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
    LAST_DIGITS = "differs only in the last digits"
    # Between checkpoints, whatever the policy.
    GRADIENT = "norm of the difference"
    NOT_FINITE = "not finite"
    SHAPE = "shape"
    # Between the traces of two layouts.
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


@dataclass(frozen=True, kw_only=True)
class Layer(LayerResult):
    """One test that a metric was put to, whether or not it decided."""

    rule: ComparisonRule

    @property
    def text(self) -> str:
        """The layer as text."""
        return layer_text(self.rule.value, self)


def layer_text(rule: str, result: LayerResult) -> str:
    """Return the result of a rule as text, without numbers where one is not known."""
    measured, limit, unit = result.measured, result.limit, result.unit
    where = "" if result.place is None else f" ({result.place})"
    if measured is None or limit is None:
        return f"{rule}{where}"
    if unit == RELATIVE:
        return f"{rule} {' of '.join(_told_apart(measured, limit, 1, 'e'))}{where}"
    if unit.startswith(("steps ", "requests ")):  # so many that differ, of which so many may
        thing, what = unit.split(" ")
        told = f"{counted(int(measured), thing.removesuffix('s'))} {what}"
        may = "may be" if what == "outside" else "may"
        return f"{rule} {told}, {none_or(limit)} {may}{where}"
    return f"{rule} {' of '.join(_told_apart(measured, limit, 6, 'g'))} {unit}{where}"


def _told_apart(first: float, second: float, digits: int, style: str) -> tuple[str, str]:
    """Return two numbers as texts, with as many more digits as differing ones need to differ."""
    for more in range(digits, 18):
        texts = f"{first:.{more}{style}}", f"{second:.{more}{style}}"
        if texts[0] != texts[1]:
            return texts
    return f"{first:.{digits}{style}}", f"{second:.{digits}{style}}"


def counting_layer(
    rule: ComparisonRule, count: int, limit: int, unit: str, place: str | None = None
) -> Layer:
    """Return a layer that counts something of which no more than `limit` may be."""
    return Layer(
        rule=rule,
        passed=count <= limit,
        measured=float(count),
        limit=float(limit),
        unit=unit,
        place=place,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """The allowed distance from each value of a golden, as charts need it.

    Attributes:
        relative: (step, part of the golden) each holds from its step on to the next one's.
        absolute: Added to that, in the metric's own unit.
    """

    relative: tuple[tuple[int, float], ...]
    absolute: float = 0.0


def allowed_of(widths: Mapping[int, float], absolute: float) -> Allowed:
    """Return the widths of ascending steps, equal neighbours merged."""
    kept: list[tuple[int, float]] = []
    for step, width in widths.items():
        if not kept or kept[-1][1] != width:
            kept.append((step, width))
    return Allowed(relative=tuple(kept), absolute=absolute)


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
    layers: tuple[Layer, ...] = ()
    allowed: Allowed | None = None

    @property
    def is_judged(self) -> bool:
        """True if the values were compared, not only their presence."""
        return self.rule is not ComparisonRule.NOT_JUDGED

    @property
    def is_golden_to_blame(self) -> bool:
        """True if it failed whatever the run measured."""
        return not self.passed and self.rule in _FAULTS_OF_GOLDEN


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
        texts["passed" if layer.passed else "failed"].append(layer.text)
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
    first, summary, allowed = comparison.first, comparison.summary, comparison.allowed
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
        allowed=None
        if allowed is None
        else RecordedBand(
            relative={str(step): part for step, part in allowed.relative},
            absolute=allowed.absolute,
        ),
        layers=tuple(_recorded_layer(layer) for layer in comparison.layers),
        golden_path=comparison.golden_path,
        text=render(comparison),
    )


def _recorded_layer(layer: Layer) -> RecordedLayer:
    """Return a layer by the name of its rule."""
    values = {name: value for name, value in vars(layer).items() if name != "rule"}
    return RecordedLayer(layer=layer.rule.value, **values)


def relative(observed: float, golden: float) -> float:
    """Return (observed - golden) / |golden|; over a golden of 0 it is 0 or infinite."""
    if observed == golden:
        return 0.0
    if golden == 0:
        return math.copysign(math.inf, observed)
    return (observed - golden) / abs(golden)


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


_NUM_DECIMALS = 5  # Megatron-LM's extraction, and so its goldens


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One step at which golden and run both have a finite number."""

    step: int
    observed: float
    golden: float

    @property
    def signed(self) -> float:
        """Return observed - golden."""
        return self.observed - self.golden


def align(golden: Series, observed: Series) -> tuple[Series, Series]:
    """Return both series in the precision that they share, so that equal means equal.

    TensorBoard holds float32. A golden of full precision has the shortest decimal of each, so both
    sides become float32. One of five decimals is compared with a run of full precision only after
    the run is rounded in the same way. Whole numbers stay as they are.

    Source: Megatron-LM tests/functional_tests/python_test_utils/common.py, d98e8a64dd (round).
    """
    if golden.is_full_precision:
        return _as_float32(golden), _as_float32(observed)
    if observed.is_full_precision:
        values = tuple(
            round(v, _NUM_DECIMALS) if isinstance(v, float) and math.isfinite(v) else v
            for v in observed.values
        )
        return golden, replace(observed, values=values)
    return golden, observed


def shared_points(golden: Series, observed: Series) -> list[Point]:
    """Return the steps at which both have a finite number, ascending."""
    at = dict(observed.items())
    return [
        Point(step=step, observed=o, golden=g)
        for step, g in golden.items()
        if isinstance(g, float) and isinstance(o := at.get(step), float)
        if math.isfinite(g) and math.isfinite(o)
    ]


def measure(points: Sequence[Point]) -> Deviation:
    """Return the largest and the mean deviation over `points`."""
    if not points:
        return Deviation()
    worst = max(points, key=lambda p: abs(relative(p.observed, p.golden)))
    largest = abs(relative(worst.observed, worst.golden))
    return Deviation(
        num_compared=len(points),
        worst_step=worst.step if largest > 0 else None,
        largest_relative=largest,
        largest_absolute=max(abs(p.signed) for p in points),
        mean_signed_relative=mean_signed(points),
    )


def mean_signed(points: Sequence[Point]) -> float:
    """Return sum of (observed - golden) / sum of |golden|: no single step near 0 dominates."""
    scale = math.fsum(abs(p.golden) for p in points)
    return relative(scale + math.fsum(p.signed for p in points), scale)


def first_difference(golden: Series, observed: Series) -> StepDifference | None:
    """Return the first golden step at which the run has not the very same value."""
    at = dict(observed.items())
    for step, value in golden.items():
        if not _is_same(at.get(step), value):
            return StepDifference(step=step, observed=at.get(step), golden=value)
    return None


def ulps_between(observed: float, golden: float) -> int:
    """Return how many float32 numbers lie between two of them, counted from one to the other."""
    first, second = (_position(value) for value in (observed, golden))
    return abs(first - second)


def _position(value: float) -> int:
    """Return the index of a float32 in the order of all of them."""
    (bits,) = struct.unpack("<i", struct.pack("<f", value))
    index: int = bits if bits >= 0 else -(bits & 0x7FFFFFFF)
    return index


def _is_same(observed: Value | None, golden: Value) -> bool:
    """Return whether two values are equal, nan included."""
    if observed is None or isinstance(observed, str) or isinstance(golden, str):
        return observed == golden
    return observed == golden or (math.isnan(observed) and math.isnan(golden))


def _as_float32(series: Series) -> Series:
    """Return a series rounded to float32."""
    values = tuple(
        to_float32(v) if isinstance(v, float) and is_finite(v) and not v.is_integer() else v
        for v in series.values
    )
    return replace(series, values=values)


LEAST_COVERED = 0.9  # of a run, by its golden


def without_unmeasured_end(series: Series) -> Series:
    """Return a series up to its last number, where only text follows; whole if there is no number.

    Megatron-LM writes "nan" for every step up to the end of the schedule that a training did not
    get to, as in the goldens of its releases, which a time limit ends.
    """
    end = len(series)
    while end and isinstance(series.values[end - 1], str):
        end -= 1
    if end in (0, len(series)):
        return series
    return replace(series, steps=series.steps[:end], values=series.values[:end])


def describe_uncovered(golden: Series, observed: Series) -> str | None:
    """Return a note on a golden that holds too few of the steps of a run, or None.

    Steps are counted at the golden's distance. Single ones at an end are no matter, since goldens
    are cut at half-open ranges.
    """
    steps = list(observed.finite())
    if not len(golden) or not steps:
        return None
    first, last, interval = golden.steps[0], golden.steps[-1], step_interval(golden.steps)
    num_outside = max(0, steps[-1] - last) // interval + max(0, first - steps[0]) // interval
    if len(golden) >= LEAST_COVERED * (len(golden) + num_outside):
        return None
    return (
        f"it has steps {first} to {last}, the run {steps[0]} to {steps[-1]}, whose rest would pass "
        "unseen; record it again"
    )


def find_unusable(golden: Series) -> StepDifference | None:
    """Return the first golden step without a finite number."""
    for step, value in golden.items():
        if not is_finite(value):
            return StepDifference(step=step, observed=None, golden=value)
    return None


def find_absent(
    golden: Series, observed: Series
) -> tuple[ComparisonRule, StepDifference, tuple[str, ...]] | None:
    """Return the missing steps of a run, or None if it has a finite number at every golden step.

    The rule is that of the first such step, or `truncated` if nothing is wrong but that the run
    ends too early. The notes count the steps of each kind.
    """
    at = dict(observed.items())
    absent = [
        StepDifference(step=step, observed=at.get(step), golden=value)
        for step, value in golden.items()
        if not is_finite(at.get(step))
    ]
    if not absent:
        return None
    rules = [_rule_of(difference.observed) for difference in absent]
    rule = rules[0]
    counts = Counter(r.value for r in rules)
    notes = [
        f"{n} of {counted(len(golden), 'step')} {'is' if n == 1 else 'are'} {kind} in the run"
        for kind, n in sorted(counts.items())
    ]
    last = observed.steps[-1] if observed.steps else 0
    if set(rules) == {ComparisonRule.MISSING} and absent[0].step > last:
        rule = ComparisonRule.TRUNCATED
        notes.append(f"the run ends at step {last}, the golden at step {golden.steps[-1]}")
    return rule, absent[0], tuple(notes)


def describe_extra(golden: Series, observed: Series) -> tuple[str, ...]:
    """Return a note on steps that only the run has, if the golden ends before it."""
    if not len(golden):
        return ()
    extra = [step for step in observed.steps if step > golden.steps[-1]]
    if not extra:
        return ()
    found = counted(len(extra), "step")
    return (f"{found} after the golden's last, {golden.steps[-1]}, not compared",)


def describe_skipped(num_steps: int) -> tuple[str, ...]:
    """Return a note on golden steps that were left out because nothing was measured there."""
    return (f"{counted(num_steps, 'step')} not measured, not compared",) if num_steps else ()


def find_frozen(
    golden: Series | None, observed: Series, *, least_steps: int
) -> tuple[int, int] | None:
    """Return first and last step of a constant stretch of the run where the golden moves.

    A stretch counts from `least_steps` golden steps on, and only if the golden's longest constant
    stretch within it is less than half as long. Without a golden every such stretch counts.
    """
    at = dict(observed.items())
    expected = at if golden is None else dict(golden.items())
    steps = [step for step in expected if step in at]
    for _, group in groupby(steps, key=at.__getitem__):
        stretch = list(group)
        if len(stretch) < least_steps:
            continue
        if golden is None or 2 * _longest_constant([expected[s] for s in stretch]) < len(stretch):
            return stretch[0], stretch[-1]
    return None


def _rule_of(value: Value | None) -> ComparisonRule:
    """Return the rule that a value breaks which is no finite number."""
    if value is None:
        return ComparisonRule.MISSING
    if isinstance(value, str):
        return ComparisonRule.TEXT
    return ComparisonRule.NAN if math.isnan(value) else ComparisonRule.INF


def _longest_constant(values: list[Value]) -> int:
    return max(len(list(group)) for _, group in groupby(values))

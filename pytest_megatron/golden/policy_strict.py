"""The default policy: a run passes only if it is whole and where the golden says it was. Pure.

Layers, in this order; the first that fails decides and is named in the answer:

1. the golden is whole, the run is whole (`presence.py`): missing, nan, inf and text are different;
2. equal bit for bit: passed;
3. by kind of metric (`layers.py`): a loss, and any metric that is none of the others, by its
   first step, its shape, every step, mean and tail; num-zeros by mean, tail and median; time and
   memory upwards only, and only against a golden of the same class of host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pytest_megatron.golden.band import band_around
from pytest_megatron.golden.comparison import Comparison, Rule
from pytest_megatron.golden.deviation import align, first_difference, measure, shared_points
from pytest_megatron.golden.layers import (
    Judgement,
    judge_loss,
    judge_memory,
    judge_time,
    judge_zeros,
)
from pytest_megatron.golden.model import MetricMap, Series, is_finite
from pytest_megatron.golden.presence import (
    describe_extra,
    describe_skipped,
    find_absent,
    find_unusable,
)
from pytest_megatron.golden.provenance import Golden

_TIME = "iteration-time"
_ZEROS = "num-zeros"
_WITH_PLACEHOLDERS = (_TIME, _ZEROS)
_MEMORY = ("mem-allocated-bytes", "mem-max-allocated-bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """What is the same for every metric of one comparison; as `compare_strictly` has it."""

    golden: Golden
    nondeterministic: bool
    host_class: str | None
    is_metric_asked_for: bool


def compare_strictly(
    golden: Golden,
    observed: MetricMap,
    *,
    metrics: Sequence[str] | None,
    nondeterministic: bool,
    host_class: str | None,
) -> tuple[Comparison, ...]:
    """Compare a run with a golden, metric by metric.

    Args:
        golden: What was committed.
        observed: What the run measured.
        metrics: Which to compare; None means every metric of the golden, where one without any
            number (Megatron-LM writes "nan" for what it did not measure) is not judged.
        nondeterministic: Whether the case says that its results vary from run to run.
        host_class: The class of host of the run; time and memory are judged only against a golden
            of the same class, and a loss of reduced precision more loosely against one of another.
    """
    case = _Case(
        golden=golden,
        nondeterministic=nondeterministic,
        host_class=host_class,
        is_metric_asked_for=metrics is not None,
    )
    wanted = tuple(golden.metrics) if metrics is None else tuple(metrics)
    return tuple(_compare(case, metric, observed.get(metric)) for metric in wanted)


def _compare(case: _Case, metric: str, observed: Series | None) -> Comparison:
    golden = case.golden.metrics.get(metric)
    answer = Comparison(
        metric=metric, passed=False, rule=Rule.NO_GOLDEN, golden_path=case.golden.path
    )
    if golden is None:
        return answer
    if not (case.is_metric_asked_for or any(is_finite(value) for value in golden.values)):
        note = "the golden has no number for it"
        return replace(answer, passed=True, rule=Rule.NOT_JUDGED, notes=(note,))
    if observed is None:
        return replace(answer, rule=Rule.NO_METRIC)
    golden, observed = align(golden, observed)
    num_steps = len(golden)
    if metric in _WITH_PLACEHOLDERS:
        golden = _without_placeholders(golden)
    if metric == _TIME:
        golden = _without_untimed_start(golden, observed)
    first = first_difference(golden, observed)
    judgement = _find_hole(golden, observed)
    if judgement is None and first is None:
        equal = "bitwise equal" if golden.is_full_precision else "equal to five decimals"
        judgement = Judgement(passed=True, rule=Rule.BITWISE, notes=(equal,))
    if judgement is None:
        judgement = _judge(case, metric, golden, observed)
    return replace(
        answer,
        passed=judgement.passed,
        rule=judgement.rule,
        first=judgement.first or first,
        summary=judgement.summary,
        deviation=measure(shared_points(golden, observed)),
        notes=(
            *judgement.notes,
            *describe_skipped(num_steps - len(golden)),
            *describe_extra(golden, observed),
        ),
    )


def _judge(case: _Case, metric: str, golden: Series, observed: Series) -> Judgement:
    """Judge two whole series that differ, by the kind of the metric."""
    points = shared_points(golden, observed)
    if metric == _ZEROS:
        return judge_zeros(points)
    if metric == _TIME or metric in _MEMORY:
        reason = why_not_timed(case.golden, case.host_class)
        if reason is not None:
            return Judgement(passed=True, rule=Rule.NOT_JUDGED, notes=(reason,))
        return judge_time(points) if metric == _TIME else judge_memory(points)
    band = band_around(
        case.golden,
        metric,
        golden,
        nondeterministic=case.nondeterministic,
        host_class=case.host_class,
    )
    return judge_loss(golden, observed, points, band)


def _find_hole(golden: Series, observed: Series) -> Judgement | None:
    """Look for what is not there, on either side."""
    if not len(golden):
        note = "the golden has no value for it"
        return Judgement(passed=False, rule=Rule.GOLDEN_UNUSABLE, notes=(note,))
    unusable = find_unusable(golden)
    if unusable is not None:
        return Judgement(passed=False, rule=Rule.GOLDEN_UNUSABLE, first=unusable)
    absent = find_absent(golden, observed)
    if absent is not None:
        rule, first, notes = absent
        return Judgement(passed=False, rule=rule, first=first, notes=notes)
    return None


def _without_placeholders(golden: Series) -> Series:
    """Return the steps that the golden has a value for.

    Megatron-LM writes "nan" where it measured nothing: a step that it did not time, or a step
    without an update (fp16 loss scaling), which has no gradient to count zeros in. Neither is a
    hole; in a loss it would be one.
    """
    if all(isinstance(value, str) for value in golden.values):
        return golden
    kept = [(step, value) for step, value in golden.items() if not isinstance(value, str)]
    return replace(golden, steps=tuple(s for s, _ in kept), values=tuple(v for _, v in kept))


def _without_untimed_start(golden: Series, observed: Series) -> Series:
    """Return the golden without its first step if the run has no time there, as after a restart."""
    if len(golden) > 1 and not is_finite(observed.at(golden.steps[0])):
        return golden.after(golden.steps[0])
    return golden


def why_not_timed(golden: Golden, host_class: str | None) -> str | None:
    """Return why time and memory of a run are not judged; None where they are."""
    theirs = None if golden.provenance is None else golden.provenance.host_class
    if theirs is None:
        return "the golden does not say on which class of host it was measured"
    if host_class is None:
        return f"the golden is from {theirs!r}, the class of this host is not known"
    if theirs != host_class:
        return f"the golden is from {theirs!r}, this host is {host_class!r}"
    return None

"""Comparison of the output of an inference program with its golden, under either policy. Pure.

One answer a metric. Under `strict` a request that either side lacks is a difference, a listed
metric that either side lacks is a failure, and text is compared whole. Under `megatron` the verdict
is that of Megatron-LM's own comparison; where that ends with a Python error, the answer is a
failure with the reason.

Source: Megatron-LM tests/functional_tests/python_test_utils/test_inference_regular_pipeline.py,
d98e8a64dd.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pytest_megatron.base.text import counted
from pytest_megatron.runs.record import Deviation
from pytest_megatron.workloads.golden.compare.result import (
    Comparison,
    ComparisonRule,
    SeriesSummary,
    StepDifference,
    counting_layer,
    is_within,
    summary_layer,
    unjudged,
)
from pytest_megatron.workloads.golden.model import (
    COUNTS,
    LOGPROBS,
    MEMORY,
    REQUEST_METRICS,
    ROUTING,
    TEXT,
    THROUGHPUT,
    TOKENS,
    Generation,
    PromptAnswer,
    has_metric,
)
from pytest_megatron.workloads.golden.policy import ComparisonPolicy, Worse

LOGPROB_ABSOLUTE = 1e-3
_SLOWEST, _FASTEST = 0.9, 1.2
_MEMORY_RELATIVE = 0.05
_SHOWN_TEXT = 24  # characters around the first that differs
_REQUESTS = "requests"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A golden and a run of it.

    Attributes:
        path: The golden's file, for messages.
        policy: Which policy judges.
        not_timed: Why throughput and memory are not judged; None where they are.
    """

    golden: Generation
    observed: Generation
    path: str
    policy: ComparisonPolicy
    not_timed: str | None = None


def compare_generation(pair: Pair, metrics: Sequence[str]) -> tuple[Comparison, ...]:
    """Compare `metrics`, in this order; an answer on the requests themselves comes first.

    Args:
        pair: The golden and the run.
        metrics: The case's METRICS, out of `GENERATION_METRICS`; at least one.
    """
    assert metrics
    answers = [_compare(pair, metric) for metric in metrics]
    return tuple(a for a in (_compare_requests(pair, metrics), *answers) if a is not None)


def _compare_requests(pair: Pair, metrics: Sequence[str]) -> Comparison | None:
    """Find requests that only one side has, and those of which nothing was compared."""
    golden, observed = pair.golden.requests, pair.observed.requests
    lost = [f"request {name!r} is missing in the run" for name in golden if name not in observed]
    extra = [f"request {n!r} is not in the golden" for n in observed if n not in golden]
    wanted = [metric for metric in metrics if metric in REQUEST_METRICS]
    unchecked = []
    if wanted or not pair.policy.is_strict:
        unchecked = [
            f"request {name!r} of the golden has none of the METRICS"
            for name, request in golden.items()
            if not any(has_metric(request, metric) for metric in wanted)
        ]
    problems = (*lost, *extra, *unchecked)
    if not problems:
        return None
    return replace(_answer(pair, _REQUESTS), rule=ComparisonRule.NO_REQUEST, notes=_few(problems))


def _compare(pair: Pair, metric: str) -> Comparison | None:
    """Compare one metric of an inference program; None if it may be absent, and is."""
    if metric in REQUEST_METRICS:
        return _compare_of_requests(pair, metric)
    answer = _answer(pair, metric)
    if not pair.golden.has(metric):
        return answer if pair.policy.is_strict else None
    if not pair.observed.has(metric):
        return replace(answer, rule=ComparisonRule.NO_METRIC)
    one = replace(answer, deviation=Deviation(num_compared=1))
    if metric in COUNTS:
        return _compare_count(one, pair.golden.counts[metric], pair.observed.counts[metric])
    if pair.not_timed is not None:
        return unjudged(answer, pair.not_timed)
    return (_compare_throughput if metric == THROUGHPUT else _compare_memory)(pair, one)


def _compare_of_requests(pair: Pair, metric: str) -> Comparison | None:
    """Compare one metric of every request that both sides have."""
    answer = replace(_answer(pair, metric), unit="requests")
    shared = [
        (name, request, pair.observed.requests[name])
        for name, request in pair.golden.requests.items()
        if name in pair.observed.requests
    ]
    if not pair.policy.is_strict:  # what the golden does not have is not looked at there
        shared = [row for row in shared if has_metric(row[1], metric)]
        if not shared:
            return None
    without = [name for name, request, _ in shared if not has_metric(request, metric)]
    if without:
        return replace(answer, rule=ComparisonRule.NO_GOLDEN, notes=_few(without, "request"))
    without = [name for name, _, request in shared if not has_metric(request, metric)]
    if without:
        return replace(answer, rule=ComparisonRule.NO_METRIC, notes=_few(without, "request"))
    found = {
        name: difference
        for name, golden, observed in shared
        if (difference := _first_difference(pair, metric, golden, observed)) is not None
    }
    largest = max((_largest(metric, g, o) for _, g, o in shared), default=0.0)
    notes: tuple[str, ...] = ()
    if metric in LOGPROBS:
        allowed = pair.policy.limit(metric, "absolute", LOGPROB_ABSOLUTE)
        notes = (f"largest difference {largest:.1e}, {allowed:.0e} may be",)
    layer = counting_layer(ComparisonRule.EXACT, len(found), 0, "requests differ")
    answer = replace(answer, layers=(layer,))
    if found:
        name, first = next(iter(found.items()))
        first = replace(first, place=f"request {name!r}, {first.place}")
        count = f"{len(found)} of {counted(len(shared), 'request')} differ"
        return replace(answer, rule=ComparisonRule.EXACT, first=first, notes=(count, *notes))
    deviation = Deviation(num_compared=len(shared), largest_absolute=largest)
    if notes:
        notes = (f"{metric} differ by {largest:.1e} at most" if largest else f"{metric} equal",)
    return replace(answer, passed=True, rule=ComparisonRule.EXACT, deviation=deviation, notes=notes)


def _first_difference(
    pair: Pair, metric: str, golden: PromptAnswer, observed: PromptAnswer
) -> StepDifference | None:
    """Return where the answer to a request leaves its golden; None where it does not."""
    if metric == TEXT:
        return _first_in_text(
            golden.text or "", observed.text or "", is_strict=pair.policy.is_strict
        )
    if metric == ROUTING:
        return _first_in_routing(golden, observed)
    tolerance = 0.0 if metric == TOKENS else pair.policy.limit(metric, "absolute", LOGPROB_ABSOLUTE)
    what = "token" if metric == TOKENS else "position"
    expected, got = (
        tuple(map(float, one.tokens or ())) if metric == TOKENS else one.logprobs[metric]
        for one in (golden, observed)
    )
    for position, (e, g) in enumerate(zip(expected, got, strict=False)):
        if not (g == e or abs(g - e) <= tolerance):
            place = f"{what} {position}"
            return StepDifference(step=position, place=place, observed=g, golden=e)
    if len(got) == len(expected):
        return None
    return StepDifference(
        step=min(len(got), len(expected)),
        place=f"number of {what}s",
        observed=float(len(got)),
        golden=float(len(expected)),
    )


def _first_in_text(golden: str, observed: str, *, is_strict: bool) -> StepDifference | None:
    """Compare text whole; the other policy compares the shared length, and refuses empty text."""
    length = min(len(golden), len(observed))
    position = next((i for i in range(length) if golden[i] != observed[i]), length)
    is_longer = len(golden) != len(observed) if is_strict else length == 0
    if position == length and not is_longer:
        return None
    start = max(0, position - _SHOWN_TEXT // 2)
    return StepDifference(
        step=position,
        place=f"character {position}",
        observed=observed[start : start + _SHOWN_TEXT],
        golden=golden[start : start + _SHOWN_TEXT],
    )


def _first_in_routing(golden: PromptAnswer, observed: PromptAnswer) -> StepDifference | None:
    """Return the first position whose experts differ."""
    assert golden.routing is not None
    assert observed.routing is not None
    for position, experts in golden.routing.items():
        got = observed.routing.get(position)
        if got != experts:
            return StepDifference(
                step=position,
                place=f"token {position}",
                observed=None if got is None else str([list(layer) for layer in got]),
                golden=str([list(layer) for layer in experts]),
            )
    return None


def _compare_count(answer: Comparison, golden: float, observed: float) -> Comparison:
    """Compare a count of an inference program."""
    first = None
    if golden != observed:
        first = StepDifference(step=0, place="count", observed=observed, golden=golden)
    return replace(answer, rule=ComparisonRule.EXACT, first=first, passed=first is None)


def _compare_throughput(pair: Pair, answer: Comparison) -> Comparison:
    """Compare tokens per second by the median after the warm-up."""
    golden, observed = _steady(pair.golden.throughput), _steady(pair.observed.throughput)
    too_fast = observed >= _FASTEST * golden
    slowest = 1 - pair.policy.limit(THROUGHPUT, "median", 1 - _SLOWEST)
    worse = pair.policy.worse(THROUGHPUT, Worse.LOWER if pair.policy.is_strict else Worse.EITHER)
    passed = observed >= slowest * golden and (worse is Worse.LOWER or not too_fast)
    notes = [f"median {observed:.6g} tokens/s, golden {golden:.6g}"]
    if too_fast:
        notes.append("much faster than the golden: refresh it, so that it guards this speed")
    tolerance = 1 - slowest if observed < golden else _FASTEST - 1
    name = "median after the warm-up"
    summary = SeriesSummary(name=name, observed=observed, golden=golden, tolerance=tolerance)
    return _by_median(replace(answer, passed=passed, notes=tuple(notes)), summary)


def _compare_memory(pair: Pair, answer: Comparison) -> Comparison:
    """Compare peak memory by its median, both ways: a run that needs less did less."""
    golden, observed = _steady(pair.golden.memory_bytes), _steady(pair.observed.memory_bytes)
    tolerance = pair.policy.limit(MEMORY, "median", _MEMORY_RELATIVE)
    summary = SeriesSummary(name="median", observed=observed, golden=golden, tolerance=tolerance)
    passed = golden > 0 and is_within(summary, pair.policy.worse(MEMORY, Worse.EITHER))
    return _by_median(replace(answer, passed=passed), summary)


def _by_median(answer: Comparison, summary: SeriesSummary) -> Comparison:
    """Return the comparison of two medians, of which it is known whether it passed."""
    rule = ComparisonRule.MEDIAN
    layers = (summary_layer(rule, summary, passed=answer.passed),)
    return replace(answer, rule=rule, summary=summary, layers=layers)


def _answer(pair: Pair, metric: str) -> Comparison:
    """Return the answer that the golden lacks a metric."""
    return Comparison(
        metric=metric,
        passed=False,
        rule=ComparisonRule.NO_GOLDEN,
        golden_path=pair.path,
        unit="values",
    )


def _steady(values: Sequence[float]) -> float:
    """Return the median without the first value, which warms up, where there are more."""
    return statistics.median(values[1:] or values)


def _largest(metric: str, golden: PromptAnswer, observed: PromptAnswer) -> float:
    """Return the largest finite difference of log-probabilities at the same position."""
    if metric not in LOGPROBS:
        return 0.0
    pairs = zip(golden.logprobs[metric], observed.logprobs[metric], strict=False)
    return max((abs(g - o) for g, o in pairs if math.isfinite(g - o)), default=0.0)


def _few(texts: Sequence[str], what: str = "") -> tuple[str, ...]:
    """Return the first texts, and how many more there are."""
    shown = tuple(f"{what} {text!r}" if what else text for text in texts[:3])
    return (*shown, f"and {len(texts) - 3} more") if len(texts) > len(shown) else shown

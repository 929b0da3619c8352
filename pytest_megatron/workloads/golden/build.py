"""A new golden from repeats of one clean run. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from pytest_megatron.workloads.golden.model import (
    ROUTING,
    TEXT,
    TOKENS,
    Generation,
    Golden,
    MetricMap,
    Series,
    Spread,
    Value,
    is_finite,
    series_of,
)
from pytest_megatron.workloads.golden.policy import NORMS

# What Megatron-LM keeps of a run; anything else is kept only where the case compares it.
# Source: Megatron-LM tests/functional_tests/python_test_utils/
# get_test_results_from_tensorboard_logs.py, d98e8a64dd.
KEPT_METRICS = (
    "iteration-time",
    "lm loss",
    "mem-allocated-bytes",
    "mem-max-allocated-bytes",
    "mtp_1 loss",
    "mtp_2 loss",
    "num-zeros",
    "total loss",
)


def combine(repeats: Sequence[MetricMap], metrics: Sequence[str]) -> dict[str, Series]:
    """Return the golden of several repeats: at each step the median of their values.

    Args:
        repeats: At least one; a step that not all of them have is left out.
        metrics: Metrics to keep beside `KEPT_METRICS` and the norms that are finite throughout.
    """
    norms = (n for n in NORMS if all(_is_whole(repeat.get(n)) for repeat in repeats))
    wanted = {*KEPT_METRICS, *norms, *metrics}
    shared = wanted.intersection(*(repeat.keys() for repeat in repeats))
    return {name: _median([repeat[name] for repeat in repeats]) for name in sorted(shared)}


def spread_of(repeats: Sequence[MetricMap], golden: MetricMap) -> dict[str, Spread]:
    """Return the standard deviation over the repeats at each step, relative to the golden.

    One number, 0, where the repeats agree bit for bit.
    """
    found: dict[str, Spread] = {}
    for name, series in golden.items():
        values: dict[int, Value] = {}
        maps = [dict(repeat[name].items()) for repeat in repeats]
        for step, centre in series.items():
            numbers = [v for one in maps if isinstance(v := one.get(step), float)]
            assert isinstance(centre, float)
            deviation = statistics.stdev(numbers) if len(numbers) > 1 else 0.0
            values[step] = float(f"{deviation / (abs(centre) or 1.0):.3g}")
        is_exact = not any(values.values())
        found[name] = 0.0 if is_exact else series_of(values, is_full_precision=True)
    return found


def series_in(golden: Golden) -> MetricMap:
    """Return the content of a golden of either kind as series."""
    return golden.metrics if golden.generation is None else series_of_generation(golden.generation)


def series_of_generation(generation: Generation) -> dict[str, Series]:
    """Return generated values as series by position, counted from 1, one a request and metric.

    Throughput and memory vary from run to run, so they are left out.
    """
    found: dict[str, Series] = {}
    for name, request in generation.requests.items():
        values: dict[str, tuple[Value, ...]] = dict(request.logprobs)
        if request.tokens is not None:
            values[TOKENS] = tuple(float(token) for token in request.tokens)
        if request.text is not None:
            values[TEXT] = (request.text,)
        if request.routing is not None:
            values[ROUTING] = tuple(str(row) for row in request.routing.values())
        for metric, row in values.items():
            found[f"{metric} of {name}"] = series_of(
                dict(enumerate(row, start=1)), is_full_precision=True
            )
    return found


def _is_whole(series: Series | None) -> bool:
    return series is not None and all(is_finite(value) for value in series.values)


def _median(series: Sequence[Series]) -> Series:
    """Return the median of the repeats at each step."""
    maps = [one.finite() for one in series]
    steps = set(maps[0]).intersection(*maps[1:])
    medians: dict[int, Value] = {s: statistics.median(one[s] for one in maps) for s in steps}
    return series_of(medians, is_full_precision=True)

"""Differences of goldens for a terminal and for a program (Markdown: `pull_request.py`). Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

from pytest_megatron.base.files import JsonValue
from pytest_megatron.base.text import counted, plain
from pytest_megatron.workloads.refresh.difference import (
    BUCKETS,
    FileChange,
    FileDifference,
    MetricDifference,
)
from pytest_megatron.workloads.refresh.pull_request import interpret, markdown
from pytest_megatron.workloads.refresh.write import AcceptOutcome

FORMS = ("text", "json", "markdown")


def differences_text(differences: Sequence[FileDifference]) -> str:
    """Return a block for each golden that changes, those outside the band first, then words."""
    order = sorted(differences, key=lambda d: (not d.is_outside, -d.largest, d.path))
    lines: list[str] = []
    for difference in order:
        if difference.state is FileChange.UNCHANGED:
            continue
        lines.append(f"{difference.path}: {_state(difference)}")
        if difference.state is FileChange.CHANGED:
            lines += [f"    {_metric_line(metric)}" for metric in difference.metrics]
            lines += [f"    {cause}" for cause in difference.causes]
    num_same = sum(d.state is FileChange.UNCHANGED for d in differences)
    if num_same:
        lines.append(f"{num_same} unchanged")
    return plain("\n".join([*lines, *interpret(differences)]))


def _metric_line(metric: MetricDifference) -> str:
    """Return one metric in one line, headline figures first."""
    if not metric.num_new:
        return f"{metric.metric}: gone, it had {metric.num_old} steps"
    if not metric.num_old:
        return f"{metric.metric}: new, {metric.num_new} steps"
    parts = [f"{metric.num_changed} of {metric.num_old} steps change"]
    if metric.largest:
        parts.append(
            f"median {metric.median:.1e}, largest {metric.largest:.1e} at step "
            f"{metric.worst_step}, mean signed {metric.mean_signed:+.1e}"
        )
        parts.append(f"parts at step {metric.first_step}")
    if metric.num_added or metric.num_lost:
        parts.append(f"{metric.num_added} steps more, {metric.num_lost} fewer")
    if any(metric.num_not_finite):
        old, new = metric.num_not_finite
        parts.append(f"{old} -> {new} values not finite")
    if metric.is_outside:
        parts.append("outside the band")
    return f"{metric.metric}: {'; '.join(parts)}"


def differences_json(differences: Sequence[FileDifference]) -> dict[str, JsonValue]:
    """Return everything; numbers that are not finite are texts."""
    return {
        "schema": 1,
        "goldens": [_file_json(difference) for difference in differences],
        "interpretation": list[JsonValue](interpret(differences)),
    }


def outcome_text(outcome: AcceptOutcome, form: str, *, reason: str | None = None) -> str:
    """Return the differences of all goldens in one of `FORMS`; JSON names refusals as well.

    Args:
        outcome: What was accepted or refused.
        form: One of `FORMS`.
        reason: What the user gave for the change; Markdown alone shows it.
    """
    if form == "json":
        value = differences_json(outcome.differences)
        refused: list[JsonValue] = [
            {"item": name, "rule": r.rule.value, "is_soft": r.rule.is_soft, "text": r.text}
            for name, r in outcome.refused
        ]
        value = {**value, "is_written": outcome.is_written, "refused": refused}
        return json.dumps(value, indent=2, allow_nan=False)
    if form == "markdown":
        return markdown(outcome.differences, reason=reason)
    return differences_text(outcome.differences)


def _state(difference: FileDifference) -> str:
    """Describe how a golden changed."""
    if difference.state is FileChange.CHANGED:
        return "changed, outside the band" if difference.is_outside else "changed"
    return f"{difference.state.value}, {counted(difference.num_metrics, 'metric')}"


def _file_json(difference: FileDifference) -> JsonValue:
    """Return the difference of a golden as JSON."""
    trend = difference.trend
    return {
        "path": difference.path,
        "state": difference.state.value,
        "is_outside": difference.is_outside,
        "trend": None if trend is None else trend.value,
        "causes": list[JsonValue](difference.causes),
        "metrics": [_metric_json(metric) for metric in difference.metrics],
    }


def _metric_json(metric: MetricDifference) -> JsonValue:
    """Return the difference of a metric as JSON."""
    histogram = metric.histogram()
    return {
        "metric": metric.metric,
        "num_old": metric.num_old,
        "num_new": metric.num_new,
        "num_not_finite": list[JsonValue](metric.num_not_finite),
        "num_added": metric.num_added,
        "num_lost": metric.num_lost,
        "num_changed": metric.num_changed,
        "median": _number(metric.median),
        "largest": _number(metric.largest),
        "worst_step": metric.worst_step,
        "mean_signed": _number(metric.mean_signed),
        "first_step": metric.first_step,
        "parts": metric.start.value,
        "trend": metric.trend.value,
        "is_outside": metric.is_outside,
        "histogram": [
            {
                "bucket": bucket,
                "negative": histogram[index, -1],
                "zero": histogram[index, 0],
                "positive": histogram[index, 1],
            }
            for index, bucket in enumerate(BUCKETS)
        ],
    }


def _number(value: float) -> JsonValue:
    return value if math.isfinite(value) else str(value)

"""A chart shows the band that the comparison had."""

from __future__ import annotations

import math

import pytest
from made_run import curve

from pytest_megatron.base.schema import SchemaError, validate
from pytest_megatron.pages.chart import allowed_around
from pytest_megatron.runs.record import RecordedBand, RecordedMetric, to_json
from pytest_megatron.workloads.golden.compare.compare import compare
from pytest_megatron.workloads.golden.compare.result import Comparison, recorded
from pytest_megatron.workloads.golden.compare.strict import band_around, knowledge_of
from pytest_megatron.workloads.golden.model import Golden, Provenance, series_of
from pytest_megatron.workloads.golden.policy import ComparisonPolicy, LossLimits


def band_of(comparison: Comparison) -> RecordedBand:
    """The band as a page reads it from `comparison.json`."""
    return validate(RecordedMetric, to_json(recorded(comparison))).allowed or RecordedBand()


def shown(
    golden: Golden, policy: ComparisonPolicy = ComparisonPolicy.STRICT
) -> tuple[float, ...] | None:
    (found,) = compare(golden, golden.metrics, policy=policy)
    allowed = band_of(found)
    return allowed_around(golden.metrics[found.metric], allowed)


def test_a_learned_band_comes_back_step_by_step() -> None:
    spread = series_of({s: 1e-6 * s for s in range(1, 41)}, is_full_precision=True)
    golden = Golden(
        path="g.json",
        metrics={"lm loss": curve(60)},
        provenance=Provenance(repeats=5, spread={"lm loss": spread}),
    )
    known = knowledge_of(golden, "lm loss", nondeterministic=False)
    band = band_around(golden, "lm loss", golden.metrics["lm loss"], known, LossLimits())
    assert shown(golden) == pytest.approx(band.allowed)
    assert len(band.as_allowed.relative) > 5


def test_five_per_cent_of_megatron_are_five_per_cent() -> None:
    golden = Golden(path="g.json", metrics={"mem-allocated-bytes": series_of({1: 10.0, 2: 20.0})})
    (found,) = compare(
        golden, golden.metrics, metrics=["mem-allocated-bytes"], policy=ComparisonPolicy.MEGATRON
    )
    allowed = band_of(found)
    assert allowed_around(golden.metrics["mem-allocated-bytes"], allowed) == (0.5, 1.0)


def test_what_is_judged_as_a_whole_has_no_band() -> None:
    assert shown(Golden(path="g.json", metrics={"num-zeros": curve(20)})) is None


def test_a_band_of_another_version_or_a_strange_one_is_none() -> None:
    golden = series_of({1: 1.0, 2: "nan"})
    assert allowed_around(golden, RecordedBand()) is None
    for step in ("x", "-1"):
        with pytest.raises(SchemaError):
            validate(RecordedBand, {"relative": {step: 1}})
    kept = validate(RecordedBand, {"relative": {"5": 0.5}, "absolute": "inf"})
    band = allowed_around(golden, kept)
    assert band is not None
    assert band[0] == 0.5
    assert math.isnan(band[1])

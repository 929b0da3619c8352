from __future__ import annotations

import pytest

from pytest_megatron.workloads.golden.compare.strict import (
    band_around,
    growing_deviation,
    knowledge_of,
    prediction_factor,
)
from pytest_megatron.workloads.golden.model import Golden, Provenance, series_of
from pytest_megatron.workloads.golden.policy import LossLimits

SERIES = series_of(dict.fromkeys(range(1, 101), 10.0), is_full_precision=True)


@pytest.mark.parametrize(
    ("provenance", "relative_width", "num_outside"),
    [
        pytest.param(None, 2e-3, 2, id="unknown"),
        pytest.param(Provenance(deterministic=True), 1e-4, 0, id="deterministic"),
        pytest.param(
            Provenance(repeats=2, spread={"lm loss": 1e-3}), 4e-3, 2, id="two-repeats-are-no-band"
        ),
        pytest.param(
            Provenance(repeats=8, spread={"lm loss": 1e-6}), 1e-4, 2, id="repeats-that-agree"
        ),
        pytest.param(
            Provenance(repeats=8, spread={"lm loss": 1e-3}), 5.408e-3 * 1.0607, 2, id="learned"
        ),
        pytest.param(Provenance(repeats=8, spread={"other": 1.0}), 2e-3, 2, id="not-learned"),
    ],
)
def test_the_band_is_as_wide_as_what_is_known_of_the_golden(
    provenance: Provenance | None, relative_width: float, num_outside: int
) -> None:
    golden = Golden(path="g", metrics={"lm loss": SERIES}, provenance=provenance)
    known = knowledge_of(golden, "lm loss", nondeterministic=False)
    band = band_around(golden, "lm loss", SERIES, known, LossLimits())
    early = min(relative_width, 1e-3) if band.note.startswith("golden without") else relative_width
    is_widened = provenance is not None and provenance.repeats == 2  # by the spread of the two
    widths = [relative_width if is_widened else early] * 10 + [relative_width] * 90
    assert band.allowed == pytest.approx([10 * width for width in widths], rel=1e-3)
    assert band.num_outside == num_outside


def test_the_deviation_of_a_step_is_the_largest_around_it() -> None:
    spread = series_of({1: 1.0, 2: 5.0, 3: 2.0, 4: 3.0})
    back = growing_deviation(spread, (1, 2, 3, 4, 9), look_back=2, look_ahead=0)
    assert back == [1.0, 5.0, 5.0, 3.0, 3.0]
    ahead = growing_deviation(spread, (1, 2, 3, 4, 9), look_back=1, look_ahead=1)
    assert ahead == [5.0, 5.0, 3.0, 3.0, 3.0]


def test_fewer_repeats_need_a_wider_band() -> None:
    factors = [prediction_factor(repeats) for repeats in range(2, 40)]
    assert factors == sorted(factors, reverse=True)
    assert prediction_factor(8) == pytest.approx(5.408 * (9 / 8) ** 0.5)

"""Which band a chart shows around a golden: that of the policy that judged. Pure."""

from __future__ import annotations

from collections.abc import Collection

from pytest_megatron.golden.band import band_around
from pytest_megatron.golden.comparison import Rule
from pytest_megatron.golden.model import is_finite
from pytest_megatron.golden.policy_megatron import TESTS
from pytest_megatron.golden.provenance import Golden

_FIVE_DECIMALS = 5e-6
# The strict policy judges these by numbers made of many steps: no step has a limit of its own.
_NOT_BY_STEP = frozenset(
    ("iteration-time", "num-zeros", "mem-allocated-bytes", "mem-max-allocated-bytes")
)


def allowed_around(
    golden: Golden, metric: str, rules: Collection[str], notes: Collection[str] = ()
) -> tuple[float, ...] | None:
    """Return how far from each value of a golden a run may be; None where no step has a limit.

    Args:
        golden: What the run was compared with.
        metric: One of its metrics.
        rules: What decided the comparisons of it, as `comparison.json` names them.
        notes: What those said beside it.
    """
    series = golden.metrics[metric]
    values = [v for v in series.values if isinstance(v, float) and is_finite(v)]
    if not values or len(values) != len(series):
        return None
    if Rule.EXACT.value in rules:
        return (_FIVE_DECIMALS,) * len(values)
    if Rule.APPROXIMATE.value in rules:
        share = TESTS[metric].rtol if metric in TESTS else 0.0
        return tuple(share * abs(value) for value in values)
    if metric in _NOT_BY_STEP or Rule.NOT_JUDGED.value in rules:
        return None
    is_foreign = any("another class of host" in note for note in notes)
    band = band_around(
        golden,
        metric,
        series,
        nondeterministic=False,
        host_class="another" if is_foreign else None,
    )
    return band.allowed

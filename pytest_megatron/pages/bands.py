"""Which band a chart shows around a golden: what the comparison allowed, as it noted that. Pure."""

from __future__ import annotations

from bisect import bisect_right

from pytest_megatron.golden.model import Series
from pytest_megatron.pages.fields import Fields


def allowed_around(golden: Series, allowed: Fields) -> tuple[float, ...] | None:
    """Return how far from each value of a golden a run may be; None where no step has a limit.

    Args:
        golden: Whatever of it is no number has no limit (nan).
        allowed: The key of that name of a comparison in `comparison.json`.
    """
    shares = allowed.inner("relative")
    steps = sorted(int(step) for step in shares.values if step.isdecimal() and step.isascii())
    parts = [shares.number(str(step)) or 0.0 for step in steps]
    if not steps:
        return None
    absolute = allowed.number("absolute") or 0.0
    return tuple(
        parts[max(0, bisect_right(steps, step) - 1)] * abs(value) + absolute
        if isinstance(value, float)
        else float("nan")
        for step, value in golden.items()
    )

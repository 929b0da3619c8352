"""What Megatron-LM's comparison gets wrong, beside what ours makes of the same."""

from __future__ import annotations

import math

import pytest

from pytest_megatron.workloads.golden.compare.compare import compare, compare_resume
from pytest_megatron.workloads.golden.compare.result import (
    Comparison,
    ComparisonRule,
    render,
    render_layers,
)
from pytest_megatron.workloads.golden.model import (
    Golden,
    Provenance,
    RunEnvironment,
    Value,
    series_of,
)
from pytest_megatron.workloads.golden.policy import ComparisonPolicy

Values = dict[int, Value]
LOSS: Values = {s: round(2.7 + 2.2 * math.exp(-s / 20), 5) for s in range(1, 51)}
HERE = RunEnvironment(host_class="H100")


def judge(
    golden: Values, observed: Values, policy: ComparisonPolicy, *, metric: str = "lm loss"
) -> Comparison:
    made = Golden(
        path="g.json",
        metrics={metric: series_of(golden)},
        provenance=Provenance(host_class=HERE.host_class),
    )
    return compare(
        made,
        {metric: series_of(observed)},
        metrics=[metric],
        policy=policy,
        nondeterministic=True,
        surroundings=HERE,
    )[0]


def verdicts(golden: Values, observed: Values, metric: str = "lm loss") -> tuple[bool, bool]:
    """Return whether Megatron-LM's policy passes it, and whether ours does."""
    theirs, ours = (
        judge(golden, observed, policy, metric=metric).passed
        for policy in (ComparisonPolicy.MEGATRON, ComparisonPolicy.STRICT)
    )
    return theirs, ours


@pytest.mark.parametrize(
    ("golden", "observed"),
    [
        pytest.param(dict.fromkeys(LOSS, "nan"), dict.fromkeys(LOSS, "nan"), id="all-nan"),
        pytest.param({**LOSS, 9: "nan"}, {s: v for s, v in LOSS.items() if s != 9}, id="nan-gone"),
        pytest.param({**LOSS, 9: "nan"}, {**LOSS, 9: "what"}, id="another-text"),
        pytest.param(LOSS, {**LOSS, 9: "nan"}, id="nan-in-the-run"),
    ],
)
def test_no_number_is_never_equal_to_no_number(golden: Values, observed: Values) -> None:
    """For Megatron-LM nan, inf, any text and missing are one and the same, and equal."""
    assert verdicts(golden, observed) == (True, False)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({9: 9999.0}, id="one-step-is-anything"),
        pytest.param({s: v * 1.049 for s, v in LOSS.items() if isinstance(v, float)}, id="+4.9%"),
    ],
)
def test_five_percent_is_not_close(change: Values) -> None:
    """In Megatron-LM one step may be anything, and all may be 4.9 % off."""
    assert verdicts(LOSS, {**LOSS, **change}) == (True, False)


@pytest.mark.parametrize(
    ("slower", "expected"),
    [
        pytest.param(dict.fromkeys(range(1, 30), 2.0), (True, False), id="outside-the-window"),
        pytest.param(dict.fromkeys(range(30, 46, 3), 2.0), (True, True), id="single-steps"),
        pytest.param(dict.fromkeys(range(1, 51), 0.14), (False, True), id="faster"),
    ],
)
def test_time_is_judged_by_all_steps_after_the_warm_up_and_one_way(
    slower: Values, expected: tuple[bool, bool]
) -> None:
    """In Megatron-LM slow steps outside 16 of them pass, and improvements fail."""
    times: Values = dict.fromkeys(range(1, 51), 0.2)
    assert verdicts(times, {**times, **slower}, "iteration-time") == expected


@pytest.mark.parametrize(
    ("policy", "passed"),
    [(ComparisonPolicy.MEGATRON, False), (ComparisonPolicy.STRICT, True)],
    ids=["theirs", "ours"],
)
def test_a_restart_may_warm_up(policy: ComparisonPolicy, *, passed: bool) -> None:
    """After a resume Megatron-LM judges exactly the steps of the warm-up."""
    first = {"iteration-time": series_of(dict.fromkeys(range(1, 101), 0.2))}
    times = {s: 3.0 if s < 55 else 0.2 for s in range(51, 101)}
    second = {"iteration-time": series_of({**times})}
    found = compare_resume(
        first, second, train_iters=100, metrics=["iteration-time"], policy=policy
    )
    assert found[0].passed is passed


def test_a_failure_says_where_by_how_much_and_what_may_be() -> None:
    """Megatron-LM shows two lists of numbers and nothing else."""
    late: Values = {
        s: v * (1.008 if s > 30 else 1) for s, v in LOSS.items() if isinstance(v, float)
    }
    comparison = judge(LOSS, late, ComparisonPolicy.STRICT)
    assert comparison.rule is ComparisonRule.BAND
    assert render(comparison).startswith(
        "lm loss, step 31: observed 3.192286, golden 3.16695, off by 8.0e-03 relative, tolerance "
        "allows 2.0e-03; 20 of 50 steps outside, 1 may be; "
    )
    assert "largest 8.0e-03 at step " in render(comparison)
    failed, passed = render_layers(comparison)
    assert failed == (
        "failed: band 20 steps outside, 1 may (8.0e-03 of 2.0e-03 at step 31), mean 2.8e-03 of "
        "3.0e-04 (steps 1 to 50), tail mean 8.0e-03 of 5.0e-04 (steps 39 to 50)"
    )
    assert passed == (
        "passed: presence 50 of 50 steps, step 1 0.0e+00 of 1.0e-03, frozen 0 of 4 steps, early "
        "window 0 steps outside, 0 may (0.0e+00 of 1.0e-03 at step 2), outlier 8.0e-03 of 1.0e-02 "
        "(step 31)"
    )

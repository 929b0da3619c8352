"""What of several comparisons a verdict names."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_megatron.workloads.golden.compare.compare import compare
from pytest_megatron.workloads.golden.model import Golden, Value, series_of
from pytest_megatron.workloads.golden.policy import ComparisonPolicy
from pytest_megatron.workloads.verdict.compare import GOLDEN, Judgement, RepeatComparison

SOUND: dict[str, dict[int, float]] = {
    "lm loss": {s: 5.0 - s / 20 for s in range(1, 51)},
    "val loss": {s: 5.0 - s / 20 for s in range(1, 51)},
    "num-zeros": {s: 2000.0 + s for s in range(1, 51)},
    "iteration-time": {s: 0.1 + s / 1e6 for s in range(1, 51)},
}
HARDLY = {1: 4.95 * (1 + 1.02e-3)}


def headline(gaps: tuple[str, ...] = (), **changes: dict[int, Value | None]) -> str:
    return judgement(gaps, **changes).in_short


def judgement(gaps: tuple[str, ...] = (), **changes: dict[int, Value | None]) -> Judgement:
    names = {name.replace("_", " "): changed for name, changed in changes.items()}
    golden = {
        name: series_of({**values, **({1: "nan"} if name in gaps else {})})
        for name, values in SOUND.items()
    }
    observed = {
        name: series_of(
            {
                s: v
                for s, v in {**dict[int, Value | None](values), **names.get(name, {})}.items()
                if v is not None
            }
        )
        for name, values in SOUND.items()
    }
    comparisons = compare(Golden(path="g.json", metrics=golden), observed, metrics=list(SOUND))
    repeat = RepeatComparison(
        repeat=1, against=GOLDEN, measured=Path("m.json"), comparisons=comparisons
    )
    return Judgement(repeats=(repeat,), policy=ComparisonPolicy.STRICT)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param(
            {"lm_loss": {7: float("nan")}, "val_loss": {20: 3.96}},
            "lm loss is nan at step 7 (and 1 more)",
            id="a value that is none",
        ),
        pytest.param(
            {"lm_loss": {30: 9.0}, "val_loss": {20: 3.96}},
            "val loss is off at step 20 (and 1 more)",
            id="the one that was off first",
        ),
        pytest.param(
            {"lm_loss": {25: 3.7500005, **dict.fromkeys(range(31, 51), 3.45)}},
            "lm loss is frozen at step 31",
            id="where it froze, not where it was off by a bit",
        ),
    ],
)
def test_a_headline_names_what_was_off_first(
    changes: dict[str, dict[int, Value | None]], expected: str
) -> None:
    assert headline((), **changes) == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "lm loss: golden unusable at step 1"),
        ({"num-zeros": {s: 2.2 * v for s, v in SOUND["num-zeros"].items()}}, "num-zeros is off"),
    ],
)
def test_a_golden_at_fault_says_least_of_a_run(
    changes: dict[str, dict[int, Value | None]], expected: str
) -> None:
    assert headline(("lm loss",), **changes).partition(" (and")[0] == expected


def test_a_run_that_ends_before_its_golden_did_not_train_to_the_end() -> None:
    assert judgement(lm_loss=dict.fromkeys(range(13, 51))).is_too_short
    assert not judgement(lm_loss={7: None}).is_too_short

"""Policies of one's own: what a file changes for which metric, and how it is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_megatron.errors import GoldenError
from pytest_megatron.workloads.golden.compare.compare import compare
from pytest_megatron.workloads.golden.compare.rl import RlRules, compare_rl
from pytest_megatron.workloads.golden.model import Golden, series_of
from pytest_megatron.workloads.golden.policy import (
    ComparedWorkload,
    ComparisonPolicy,
    CostLimits,
    LossLimits,
    MemoryLimits,
    Worse,
    policy_named,
    read_policy,
)

OWN = """\
format_version: 1
inherit: strict
metrics:
  lm loss: {band: 5.0e-3, mean: 2.0e-3}
  mtp_* loss: {band: 1.0e-2}
  iteration-time: {median: 0.2, worse: either}
  throughput: {median: 0.2}
  num-zeros: {judged: false}
overrides:
  - cases: [gpt/tp*]
    platforms: [dgx_h200]
    metrics:
      lm loss: {band: 1.0e-2}
  - environments: [lts]
    metrics:
      mem-*: {peak: 0.05}
"""


def policy_of(tmp_path: Path, text: str = OWN) -> ComparisonPolicy:
    file = tmp_path / "policy.yaml"
    file.write_text(text)
    return read_policy(file)


def test_a_file_changes_limits_by_metric_and_inherits_the_rest(tmp_path: Path) -> None:
    policy = policy_of(tmp_path)
    assert policy.limits("lm loss") == LossLimits(band=5e-3, mean=2e-3)
    assert policy.limits("mtp_2 loss") == LossLimits(band=1e-2)
    assert policy.limits("total loss") == LossLimits()
    assert policy.limits("iteration-time") == CostLimits(median=0.2, worse=Worse.EITHER)
    assert policy.limits("throughput") == CostLimits(median=0.2, worse=Worse.LOWER)
    assert (policy.is_judged("num-zeros"), policy.is_judged("lm loss")) == (False, True)


@pytest.mark.parametrize(
    ("place", "band", "peak"),
    [
        (ComparedWorkload(case="gpt/tp2", platform="dgx_h200", environment="dev"), 1e-2, 0.01),
        (ComparedWorkload(case="gpt/tp2", platform="dgx_h100", environment="lts"), 5e-3, 0.05),
        (ComparedWorkload(case="moe/ep2", platform="dgx_h200", environment="lts"), 5e-3, 0.05),
        (None, 5e-3, 0.01),
    ],
)
def test_an_override_holds_for_its_cases_platforms_and_environments(
    tmp_path: Path, place: ComparedWorkload | None, band: float, peak: float
) -> None:
    policy = policy_of(tmp_path).at(place)
    assert policy.limits("lm loss") == LossLimits(band=band, mean=2e-3)
    assert policy.limits("mem-allocated-bytes") == MemoryLimits(peak=peak)


def test_a_file_decides_a_comparison_and_names_itself(tmp_path: Path) -> None:
    golden = Golden(
        path="g",
        metrics={
            "lm loss": series_of(dict.fromkeys(range(1, 21), 2.0)),
            "num-zeros": series_of({1: 5.0}),
        },
    )
    run = {"lm loss": series_of({s: 2.008 if s == 15 else 2.0 for s in range(1, 21)})}
    own = policy_of(tmp_path)
    assert [c.passed for c in compare(golden, run, policy=own)] == [True, True]
    assert [c.passed for c in compare(golden, run)] == [False, False]
    assert own.name == str(tmp_path / "policy.yaml")


def test_a_file_changes_the_rules_of_reinforcement_learning(tmp_path: Path) -> None:
    golden = Golden(path="g", metrics={"lm loss": series_of({1: 0.1, 2: 0.1})})
    run = {"lm loss": series_of({1: 0.1, 2: 0.1003})}
    passed = [
        compare_rl(golden, run, ["lm loss"], RlRules(policy=policy))[0].passed
        for policy in (ComparisonPolicy.STRICT, policy_of(tmp_path))
    ]
    assert passed == [True, True]
    far = {"lm loss": series_of({1: 0.1, 2: 0.1008})}
    narrow = policy_of(tmp_path, OWN.replace("5.0e-3", "5.0e-4"))
    assert not compare_rl(golden, far, ["lm loss"], RlRules(policy=narrow))[0].passed


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "band: 5.0e-3",
            "bnad: 5.0e-3",
            "policy.yaml:4: metrics.lm loss.bnad: unknown key, expected",
        ),
        ("band: 5.0e-3", "band: -1.0", ":4: metrics.lm loss.band: found -1.0, expected a number"),
        (
            "band: 5.0e-3",
            "band: 5e-3",
            "expected a number >= 0; YAML 1.1 takes that for a text, write 5.0",
        ),
        ("band: 5.0e-3", "band: .inf", ":4: metrics.lm loss.band: found inf, expected a finite"),
        (
            "band: 5.0e-3",
            "peak: 5.0e-3",
            ":4: lm loss: 'peak' is no limit of it, expected one of absolute, ",
        ),
        (
            "inherit: strict",
            "inherit: mine",
            ":2: inherit: found 'mine', expected 'strict'",
        ),
        (
            "platforms:",
            "platform:",
            "unknown key, expected one of cases, environments, metrics",
        ),
    ],
)
def test_a_wrong_file_is_one_error_with_its_line(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    assert old in OWN
    with pytest.raises(GoldenError) as caught:
        policy_of(tmp_path, OWN.replace(old, new, 1))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_relative_path_is_looked_for_in_the_root_too(tmp_path: Path) -> None:
    _ = policy_of(tmp_path)
    assert policy_named("policy.yaml", root=tmp_path).is_strict


def test_a_policy_that_judges_nothing_is_refused(tmp_path: Path) -> None:
    """A run as wrong as can be would pass."""
    text = 'format_version: 1\ninherit: strict\nmetrics:\n  "*": {judged: false}\n'
    policy = policy_of(tmp_path, text)
    golden = Golden(path="g.json", metrics={"lm loss": series_of({1: 5.0, 2: 4.0})})
    wrong = {"lm loss": series_of({1: 50.0, 2: 40.0})}
    for metrics in (None, ["lm loss"]):
        with pytest.raises(GoldenError, match="judged is false for lm loss, so nothing would be"):
            compare(golden, wrong, metrics=metrics, policy=policy)
    some = policy_of(tmp_path, text + "  lm loss: {judged: true}\n")
    assert not compare(golden, wrong, policy=some)[0].passed

"""From labels and events to what CI runs: every row of Megatron-LM's table, and labels besides."""

from __future__ import annotations

import pytest

from pytest_megatron.ci.decide import Trigger, decide, parse_labels
from pytest_megatron.ci.table import built_in_table
from pytest_megatron.errors import SelectionError
from pytest_megatron.session.decision import Decision

TABLE = built_in_table()


def decided(event: str, *labels: str, ref: str = "", cadence: str | None = None) -> Decision:
    return decide(Trigger(event=event, labels=labels, ref=ref, cadence=cadence), TABLE)


def row(decision: Decision) -> tuple[str, int, bool, str]:
    scope, cadence = ",".join(decision.scope), ",".join(decision.cadence)
    return scope, decision.n_repeat, decision.is_lightweight, cadence


@pytest.mark.parametrize(
    ("event", "labels", "ref", "expected"),
    [
        pytest.param("merge_group", (), "", ("L1", 1, False, "mergegroup"), id="merge group"),
        pytest.param("pull_request", ("Run tests",), "", ("L1", 1, True, ""), id="run tests"),
        pytest.param(
            "pull_request", ("Run functional tests",), "", ("L1", 5, False, ""), id="functional"
        ),
        pytest.param("workflow_dispatch", (), "", ("L1", 5, False, "nightly"), id="dispatch"),
        pytest.param(
            "push", (), "refs/heads/deploy-release/1", ("L1", 5, False, "pr"), id="ci workload"
        ),
        pytest.param("pull_request", (), "", ("L0", 5, False, "pr"), id="otherwise"),
        # The bot that copies a pull request pushes it: that is no CI workload.
        pytest.param("push", (), "refs/heads/pull-request/77", ("L0", 5, False, "pr"), id="copied"),
        pytest.param(
            "push",
            ("Run tests",),
            "refs/heads/pull-request/77",
            ("L1", 1, True, ""),
            id="copied, label",
        ),
    ],
)
def test_every_row_of_megatrons_table(
    event: str, labels: tuple[str, ...], ref: str, expected: tuple[str, int, bool, str]
) -> None:
    assert row(decided(event, *labels, ref=ref)) == expected


@pytest.mark.parametrize(
    ("event", "labels", "rule"),
    [
        ("merge_group", ("Run tests", "Run functional tests"), "merge group"),
        ("workflow_dispatch", ("Run functional tests", "Run tests"), "label Run tests"),
        ("workflow_dispatch", ("Run functional tests",), "label Run functional tests"),
        ("pull_request", ("Run nightly", "Run tests"), "label Run tests"),
    ],
)
def test_the_first_rule_that_matches_decides(
    event: str, labels: tuple[str, ...], rule: str
) -> None:
    decision = decided(event, *labels)
    assert (decision.rule, [c.rule for c in decision.considered if c.decides]) == (rule, [rule])


@pytest.mark.parametrize(
    ("event", "labels", "cadence", "expected"),
    [
        pytest.param("schedule", (), None, ("L2", ("nightly",)), id="schedule"),
        pytest.param("schedule", (), "nightly", ("L2", ("nightly",)), id="nightly"),
        pytest.param("schedule", (), "weekly", ("L3", ("weekly",)), id="weekly"),
        pytest.param("workflow_dispatch", (), "weekly", ("L3", ("weekly",)), id="by hand"),
        pytest.param(
            "pull_request", ("Run nightly",), None, ("L2", ("nightly",)), id="nightly label"
        ),
        pytest.param("pull_request", ("Run weekly",), None, ("L3", ("weekly",)), id="weekly label"),
    ],
)
def test_nightly_and_weekly_reach_their_tiers(
    event: str, labels: tuple[str, ...], cadence: str | None, expected: tuple[str, tuple[str, ...]]
) -> None:
    """In Megatron-LM cadence does nothing, and L2 and L3 run nowhere."""
    decision = decided(event, *labels, cadence=cadence)
    assert (",".join(decision.scope), decision.cadence) == expected


@pytest.mark.parametrize("first", [(), ("Run tests",)])
def test_the_lts_container_label_switches_environment_and_image(first: tuple[str, ...]) -> None:
    """In Megatron-LM the label changes the image alone."""
    plain, lts = decided("pull_request", *first), decided("pull_request", *first, "container::lts")
    assert (plain.environment, plain.image, lts.environment, lts.image) == (
        *("dev", "dev"),
        *("lts", "lts"),
    )
    assert row(plain) == row(lts)


def test_the_image_follows_an_environment_that_is_asked_for() -> None:
    labels = ("container::lts",)
    lts = decide(Trigger(environment="lts"), TABLE)
    dev = decide(Trigger(environment="dev", labels=labels), TABLE)
    assert (lts.environment, lts.image, dev.environment, dev.image) == ("lts", "lts", "dev", "dev")


def test_labels_of_other_suites_count_besides_the_rule() -> None:
    decision = decided("pull_request", "Run MBridge tests", "Run tests", "Run NeMoRL tests")
    assert (decision.suites, row(decision)) == (("mbridge", "nemorl"), ("L1", 1, True, ""))


def test_labels_that_nothing_reads_are_listed_and_no_error() -> None:
    decision = decided("pull_request", "bug", "Run functional test", "RUN TESTS")
    assert decision.unknown_labels == (
        "bug",
        "Run functional test; did you mean 'Run functional tests'?",
    )
    assert decision.rule == "label Run tests"  # GitHub tells labels apart without regard to case


def test_an_unknown_event_is_an_error() -> None:
    with pytest.raises(SelectionError) as caught:
        decided("merge_groups")
    assert str(caught.value) == (
        "--event: unknown event 'merge_groups', expected one of merge_group, pull_request, push, "
        "schedule, workflow_dispatch; did you mean 'merge_group'?"
    )


@pytest.mark.parametrize(
    ("text", "labels"),
    [
        ("", ()),
        (" , ", ()),
        ("Run tests, bug", ("Run tests", "bug")),
        ('["a, b", "c", "c"]', ("a, b", "c")),
        ("[]", ()),
    ],
)
def test_labels_come_with_commas_or_as_json(text: str, labels: tuple[str, ...]) -> None:
    assert parse_labels(text) == labels


@pytest.mark.parametrize("text", ['["a"', "[1]", '[["a"]]', "[" * 100_000], ids=range(4))
def test_labels_that_are_no_list_are_one_clear_error(text: str) -> None:
    with pytest.raises(SelectionError, match="is no list of labels, expected words with commas"):
        parse_labels(text)

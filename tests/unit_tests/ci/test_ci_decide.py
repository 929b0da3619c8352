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


def row(decision: Decision) -> tuple[str, int, bool]:
    return ",".join(decision.scope), decision.n_repeat, decision.is_lightweight


@pytest.mark.parametrize(
    ("event", "labels", "ref", "expected"),
    [
        pytest.param("merge_group", (), "", ("L1", 1, False), id="merge group"),
        pytest.param("pull_request", ("Run tests",), "", ("L1", 1, True), id="run tests"),
        pytest.param(
            "pull_request", ("Run functional tests",), "", ("L1", 5, False), id="functional"
        ),
        pytest.param("workflow_dispatch", (), "", ("L1", 5, False), id="dispatch"),
        pytest.param("push", (), "refs/heads/deploy-release/1", ("L1", 5, False), id="ci workload"),
        pytest.param("pull_request", (), "", ("L0", 5, False), id="otherwise"),
        # The bot that copies a pull request pushes it: that is no CI workload.
        pytest.param("push", (), "refs/heads/pull-request/77", ("L0", 5, False), id="copied"),
        pytest.param(
            "push",
            ("Run tests",),
            "refs/heads/pull-request/77",
            ("L1", 1, True),
            id="copied, label",
        ),
    ],
)
def test_every_row_of_megatrons_table(
    event: str, labels: tuple[str, ...], ref: str, expected: tuple[str, int, bool]
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
    ("event", "labels", "cadence"),
    [
        ("merge_group", (), ("mergegroup",)),
        ("schedule", (), ("nightly",)),
        ("workflow_dispatch", (), ("nightly",)),
        ("pull_request", (), ("pr",)),
        ("pull_request", ("Run tests",), ()),
        ("pull_request", ("Run functional tests",), ()),
    ],
)
def test_the_cadence_follows_the_event_and_a_label_empties_it(
    event: str, labels: tuple[str, ...], cadence: tuple[str, ...]
) -> None:
    assert decided(event, *labels).cadence == cadence


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
    assert (decision.suites, row(decision)) == (("mbridge", "nemorl"), ("L1", 1, True))


def test_a_label_may_set_variables_of_the_jobs() -> None:
    assert decided("pull_request", "Record checkpoints").env == {"RECORD_CHECKPOINTS": "true"}


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


def test_each_rule_says_why_it_decides_or_not() -> None:
    decision = decided("push", "bug", ref="refs/heads/main")
    assert [(c.rule, c.why) for c in decision.considered] == [
        ("merge group", "needs event 'merge_group', it is push"),
        ("label Run tests", "needs label 'Run tests', it is not attached"),
        ("label Run functional tests", "needs label 'Run functional tests', it is not attached"),
        ("label Run weekly", "needs label 'Run weekly', it is not attached"),
        ("label Run nightly", "needs label 'Run nightly', it is not attached"),
        ("weekly", "needs event 'schedule' or 'workflow_dispatch', it is push"),
        ("nightly", "needs event 'schedule', it is push"),
        ("dispatch", "needs event 'workflow_dispatch', it is push"),
        ("CI workload", "event push, ref refs/heads/main"),
        ("otherwise", "not looked at, 'CI workload' comes first"),
    ]
    assert decision.reason == "rule 'CI workload': event push, ref refs/heads/main"


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

from __future__ import annotations

from pytest_megatron.session.state import RetryBudget

SAID = (
    "infrastructure: 2 of 3 workloads failed for causes of the machine or the network (dns); "
    "nothing more is run again"
)
USED_UP = "the run's 3 further attempts are used up"


def test_all_workers_of_a_run_share_its_limit() -> None:
    budgets = [RetryBudget(10, number, 4) for number in range(4)]
    granted = [[budget.claim("dns") is None for _ in range(4)].count(True) for budget in budgets]
    assert granted == [3, 3, 2, 2]
    assert budgets[3].claim("dns") == (
        "2 for this worker of the run's 10 further attempts are used up"
    )


def test_no_further_attempts_at_all() -> None:
    assert RetryBudget(0).claim("dns") == "the run's 0 further attempts are used up"


def test_more_than_half_of_the_items_broken_is_infrastructure_and_said_once() -> None:
    budget = RetryBudget(10)
    assert budget.infrastructure() is None
    ends = [("a", "dns"), ("b", "dns"), ("b", "dns"), ("c", None), ("d", "dns")]
    assert [budget.note_end(*end) for end in ends] == [None, None, None, SAID, None]
    assert budget.claim("dns") == (
        "more than half of the run failed for causes of the machine or the network"
    )
    assert budget.infrastructure() == SAID.replace("2 of 3", "3 of 4")


def test_a_run_that_recovers_may_try_again() -> None:
    budget = RetryBudget(10)
    for name, cause in (("a", "dns"), ("b", "dns"), ("c", None), ("d", None)):
        budget.note_end(name, cause)
    assert budget.claim("dns") is None


def test_a_machine_that_fails_under_many_items_is_one_incident() -> None:
    budget = RetryBudget(3)
    assert [budget.claim("engine_node_fail", ("node1",)) for _ in range(14)] == [None] * 14
    assert budget.claim("dns") is None
    assert budget.claim("engine_node_fail", ("node1", "node2")) is None
    assert budget.claim("engine_lost", ("node1",)) == USED_UP
    assert budget.claim("engine_node_fail", ("node2",)) is None
    assert budget.claim("dns") == USED_UP

from __future__ import annotations

from pytest_megatron.session.state import RetryBudget


def test_all_workers_of_a_run_share_its_limit() -> None:
    budgets = [RetryBudget(10, number, 4) for number in range(4)]
    granted = [[budget.claim() is None for _ in range(4)].count(True) for budget in budgets]
    assert granted == [3, 3, 2, 2]
    assert budgets[3].claim() == ("2 for this worker of the run's 10 further attempts are used up")


def test_no_further_attempts_at_all() -> None:
    assert RetryBudget(0).claim() == "the run's 0 further attempts are used up"

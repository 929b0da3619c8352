"""The real controller on a made-up cluster: nothing is lost, nothing runs twice, verdicts hold."""

from __future__ import annotations

import pytest
from simulated.scheduler import Found, Simulation, Trouble
from simulated.workloads import Simulated, draw
from simulated_cluster import wrong_verdicts

NUM_NODES = 8


@pytest.fixture(scope="module")
def works() -> list[Simulated]:
    return draw(200, seed=3)


@pytest.fixture(scope="module")
def found(works: list[Simulated], tmp_path_factory: pytest.TempPathFactory) -> Found:
    root = tmp_path_factory.mktemp("simulated")
    trouble = Trouble(node_s=20_000.0, preemption_s=15_000.0)
    return Simulation(root, works, num_nodes=NUM_NODES, seed=3, trouble=trouble).run(60)


def test_every_workload_ends_with_its_verdict(works: list[Simulated], found: Found) -> None:
    assert len(found.verdicts) == len(works)
    assert wrong_verdicts(works, found) == {}
    assert {"passed", "flaky", "failed"} <= set(found.verdicts.values())


def test_every_kind_of_end_was_there(found: Found) -> None:
    assert set(found.ends) == {"COMPLETED", "FAILED", "NODE_FAIL", "PREEMPTED"}


def test_no_order_is_executed_twice(found: Found) -> None:
    assert set(found.executions.values()) == {1}
    assert sum(found.executions.values()) == found.num_submissions == sum(found.ends.values())


def test_one_query_is_enough_for_an_interval(found: Found) -> None:
    assert found.num_queries <= found.num_intervals

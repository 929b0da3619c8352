"""An engine whose jobs end as soon as they are asked after: what a session itself costs."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_megatron.workloads.engine.api import (
    EngineContext,
    Resources,
    Submission,
    SubmissionPhase,
    Update,
)
from pytest_megatron.workloads.engine.records import outcome_of, read_record
from pytest_megatron.workloads.recipe.model import Workload
from pytest_megatron.workloads.training.plan.plan import Setting
from simulated.workloads import leave, record_of


class InstantEngine:
    """Ends orders in the order of their submission, so many at each question."""

    name = "instant"
    is_queue = True
    interval_s = 0.0
    _MOST = 100

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._waiting: list[Submission] = []

    def settle(self, setting: Setting, _workload: Workload) -> Setting:
        """Return the setting as it is."""
        return setting

    def lacks(self, _needed: Resources) -> str | None:
        """Return nothing: it takes everything."""
        return None

    def submit(self, orders: Sequence[Submission]) -> None:
        """Keep orders."""
        self._waiting += orders

    def poll(self) -> Sequence[Update]:
        """End some."""
        done, self._waiting = self._waiting[: self._MOST], self._waiting[self._MOST :]
        return [self._ended(order) for order in done]

    def cancel(self, keys: Sequence[str]) -> None:
        """Forget orders."""
        self._waiting = [order for order in self._waiting if order.key not in keys]

    def close(self) -> None:
        """Do nothing."""

    def _ended(self, order: Submission) -> Update:
        facts = self._context.facts
        record = record_of(order.key, facts, ("node0001",), 60.0, is_good=True)
        path = self._context.engine_dir / "outcomes" / f"{order.key.replace('/', '_')}.json"
        leave(order.dirs, path, record, off=0.0)
        read = read_record(path)
        assert read is not None
        outcome = outcome_of(read, order.planned(None), facts)
        return Update(key=order.key, phase=SubmissionPhase.ENDED, outcome=outcome)

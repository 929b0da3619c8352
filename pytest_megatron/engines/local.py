"""The engine that runs an attempt on this machine, one at a time, on GPUs of its own."""

from __future__ import annotations

from pytest_megatron.engines.base import EngineContext, Planned, Submission, SubmissionOutcome
from pytest_megatron.engines.leasing import LeasingEngine
from pytest_megatron.launch.local import run_attempt
from pytest_megatron.launch.plan import Setting
from pytest_megatron.lease import Lease
from pytest_megatron.recipe.model import Workload


class LocalEngine(LeasingEngine):
    """Runs orders as processes of this machine."""

    name = "local"

    def __init__(self, context: EngineContext) -> None:
        super().__init__(context.facts.host, _carry_out)

    def settle(self, setting: Setting, _workload: Workload) -> Setting:
        """Return the setting as it is: the ranks have what the controller has."""
        return setting

    def close(self) -> None:
        """Do nothing: nothing is left."""


def _carry_out(order: Submission, planned: Planned, lease: Lease) -> SubmissionOutcome:
    return SubmissionOutcome(
        ends=run_attempt(planned.plan, planned.description, order.listener, lease.descriptors)
    )

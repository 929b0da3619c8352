"""A workload as a pytest item: setup trains, call judges.

A failure of the infrastructure ends the setup, and so is an error to pytest; a failure of the code
fails the call.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pytest
from typing_extensions import override

from pytest_megatron.hooks.options import WORKLOADS_PLUGIN
from pytest_megatron.recipe.model import Workload
from pytest_megatron.runs.record import RecordedWorkload

if TYPE_CHECKING:
    from pytest_megatron.verdict.job import CheckedJob, Training


class WorkloadRunner(Protocol):
    """The role that runs this session's workloads."""

    def load(self, path: Path) -> Sequence[Workload]:
        """Return the rows of a recipe."""

    def prepare(self, item: WorkloadItem) -> CheckedJob:
        """Put a workload's job together and make its directory."""

    def set_up(self, item: WorkloadItem) -> None:
        """Train a workload."""

    def run_test(self, item: WorkloadItem) -> None:
        """Judge a training."""


class WorkloadItem(pytest.Item):
    """One row of a recipe.

    Attributes:
        workload: The row.
        record: The one for `run.json`; None until it ran.
        training: Its training; None before and after pytest's protocol.
        finish: Returns the training, or raises why there is none, where that ran before pytest's
            protocol reaches the item; None where the item trains by itself.
    """

    record: RecordedWorkload | None
    training: Training | None
    finish: Callable[[], Training] | None

    def __init__(self, *, workload: Workload, **kwargs: object) -> None:
        super().__init__(**kwargs)  # type: ignore[arg-type]  # pytest's own keywords
        self.workload = workload
        self.record = self.training = self.finish = None

    @override
    def setup(self) -> None:
        """Train."""
        runner_of(self.config).set_up(self)

    @override
    def runtest(self) -> None:
        """Judge the training."""
        runner_of(self.config).run_test(self)

    @override
    def teardown(self) -> None:
        """Forget what was measured: there may be thousands of items."""
        self.training = None

    @override
    def reportinfo(self) -> tuple[os.PathLike[str] | str, int | None, str]:
        """Return the recipe's line, from 0, and the item's name."""
        return Path(self.path), self.workload.line - 1, self.name


def runner_of(config: pytest.Config) -> WorkloadRunner:
    """Return the role that runs this session's workloads."""
    runner: WorkloadRunner | None = config.pluginmanager.get_plugin(WORKLOADS_PLUGIN)
    assert runner is not None
    return runner

"""A workload as a pytest item: setup trains, call judges.

What is the infrastructure's fault ends the setup, and so is an error to pytest; what is the code's
fault fails the call.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pytest
from typing_extensions import override

from pytest_megatron.errors import MegatronError
from pytest_megatron.hooks.options import WORKLOADS_PLUGIN
from pytest_megatron.recipe.load import load_recipe
from pytest_megatron.recipe.model import Workload
from pytest_megatron.runs.record import RecordedWorkload
from pytest_megatron.verdict.attempt import Verdict
from pytest_megatron.verdict.retry import policy_of

if TYPE_CHECKING:
    from pytest_megatron.recipe.vocabulary import Vocabulary
    from pytest_megatron.triage.signatures import Table
    from pytest_megatron.verdict.job import CheckedJob, Training


class WorkloadRunner(Protocol):
    """The role that runs this session's workloads.

    Attributes:
        vocabulary: Words that recipes of this project may use.
    """

    vocabulary: Vocabulary

    @property
    def table(self) -> Table:
        """The signatures that failures are looked up in."""

    def prepare(self, item: WorkloadItem) -> CheckedJob:
        """Put a workload's job together and make its directory."""

    def train(self, item: WorkloadItem) -> Training:
        """Train a workload."""

    def judge(self, item: WorkloadItem, training: Training) -> None:
        """Compare a training with its golden and record what disagrees."""

    def record_training(self, item: WorkloadItem, training: Training) -> str:
        """Record a training that failed or broke; return why."""

    def record_broken(
        self, item: WorkloadItem, error: MegatronError | OSError, verdict: Verdict = ...
    ) -> str:
        """Record a workload that could not be run or judged at all; return why."""

    def with_way_back(self, problem: str, node_id: str) -> str:
        """Return why a workload did not pass, and last how to have it again."""


class WorkloadItem(pytest.Item):
    """One row of a recipe.

    Attributes:
        workload: The row.
        record: The one for `run.json`; None until it ran.
        finish: Returns what came of its training, or raises why there is none, where that ran
            before pytest's protocol reaches the item; None where the item trains by itself.
    """

    record: RecordedWorkload | None
    finish: Callable[[], Training] | None

    def __init__(self, *, workload: Workload, **kwargs: object) -> None:
        super().__init__(**kwargs)  # type: ignore[arg-type]  # pytest's own keywords
        self.workload = workload
        self.record = None
        self.finish = None
        self._training: Training | None = None

    @override
    def setup(self) -> None:
        """Train.

        Raises:
            pytest.fail.Exception: Nothing is known about the code: the workload cannot be
                planned or started, or the infrastructure failed to the end.
        """
        plugin = plugin_of(self.config)
        problem = None
        try:
            self._training = plugin.train(self) if self.finish is None else self.finish()
        except (MegatronError, OSError) as error:
            problem = plugin.record_broken(self, error)
        else:
            if self._training.verdict is Verdict.BROKEN:
                problem = plugin.record_training(self, self._training)
        if problem is not None:  # outside of `except`: the user sees one error, not a chain
            pytest.fail(plugin.with_way_back(problem, self.nodeid), pytrace=False)

    @override
    def runtest(self) -> None:
        """Judge what was trained.

        Raises:
            pytest.fail.Exception: The training failed, or a metric disagrees.
        """
        assert self._training is not None
        plugin = plugin_of(self.config)
        if self._training.verdict is Verdict.FAILED:
            plugin.record_training(self, self._training)
        else:
            try:
                plugin.judge(self, self._training)
            except (MegatronError, OSError) as error:
                plugin.record_broken(self, error, Verdict.FAILED)
        assert self.record is not None
        problem = self.record.problem
        if problem is None:
            return
        if self.record.is_expected:
            pytest.xfail(problem.partition("\n")[0])
        text = plugin.with_way_back(problem, self.nodeid)
        pytest.fail(text, pytrace=False)  # with --runxfail, the expected one too

    @override
    def teardown(self) -> None:
        """Forget what was measured: there may be thousands of items."""
        self._training = None

    @override
    def reportinfo(self) -> tuple[os.PathLike[str] | str, int | None, str]:
        """Return the recipe's line, from 0, and the item's name."""
        return Path(self.path), self.workload.line - 1, self.name


def load_workloads(config: pytest.Config, path: Path) -> Sequence[Workload]:
    """Return the rows of a recipe.

    Raises:
        RecipeError: It is no sound recipe, or a row names a signature that does not exist.
    """
    plugin = plugin_of(config)
    workloads = load_recipe(path, vocabulary=plugin.vocabulary)
    for workload in workloads:
        if workload.transient or workload.never_transient:
            policy_of(workload, max_attempts=None, backoff_s=0.0, table=plugin.table)
    return workloads


def plugin_of(config: pytest.Config) -> WorkloadRunner:
    """Return the role that runs this session's workloads."""
    plugin: WorkloadRunner | None = config.pluginmanager.get_plugin(WORKLOADS_PLUGIN)
    assert plugin is not None
    return plugin

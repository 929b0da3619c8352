"""Workloads as pytest sees them: a recipe is a collector, a row of it an item.

Setup trains, call judges: a failure of the infrastructure ends the setup, and so is an error to
pytest; a failure of the code fails the call. Imported at every pytest start, so it imports nothing
heavy.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pytest
from typing_extensions import override

from pytest_megatron.errors import MegatronError
from pytest_megatron.session.arguments import RECIPE_SUFFIXES, RECIPES_DIR, parts_below
from pytest_megatron.session.options import TRAINING_PLUGIN, WORKLOADS_PLUGIN
from pytest_megatron.session.state import IS_WORKLOAD

if TYPE_CHECKING:
    from pytest_megatron.runs.record import RecordedWorkload
    from pytest_megatron.workloads.recipe.model import Workload
    from pytest_megatron.workloads.verdict.job import CheckedJob, Training


class RecipeReader(Protocol):
    """The plugin that reads recipes."""

    def load(self, path: Path) -> Sequence[Workload]:
        """Return the rows of a recipe."""


class WorkloadRunner(Protocol):
    """The plugin that runs this session's workloads."""

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
        training: The running training; None before and after pytest's protocol.
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
        self.stash[IS_WORKLOAD] = True

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
    """Return the plugin that runs this session's workloads."""
    runner: WorkloadRunner | None = config.pluginmanager.get_plugin(TRAINING_PLUGIN)
    assert runner is not None
    return runner


_HAS_TYPE = re.compile(rb"^(?:type|rows)\s*:", re.MULTILINE)
_PLAIN_MARK = re.compile(r"[A-Za-z_]\w*").fullmatch


class RecipeFile(pytest.File):
    """One recipe; its items are the rows that the strict profile gives."""

    @override
    def collect(self) -> Iterable[WorkloadItem]:
        """Expand the recipe to pytest items.

        Raises:
            CollectError: The file is no sound recipe; the others are still collected.
        """
        try:
            reader: RecipeReader | None = self.config.pluginmanager.get_plugin(WORKLOADS_PLUGIN)
            assert reader is not None
            workloads = reader.load(self._shown_path())
        except MegatronError as error:
            raise self.CollectError(str(error)) from None
        marks = _Marks(self.config)
        for workload in workloads:
            name = workload.item_name
            # As text, pytest takes the brackets for parameters, as --lf does when it reads them.
            item = WorkloadItem.from_parent(
                self, name=name, nodeid=f"{self.nodeid}::{name}", workload=workload
            )
            item.own_markers.extend(marks.of(workload))
            yield item

    def _shown_path(self) -> Path:
        """Return the path as errors should name it."""
        try:
            return self.path.relative_to(Path.cwd())
        except ValueError:
            return self.path


def collect_recipe(file_path: Path, parent: pytest.Collector) -> RecipeFile | None:
    """Return a collector if the file is a recipe, None for any other file.

    Every YAML file in a folder of recipes is one, so that a misspelt `type:` is an error and not
    silence. Elsewhere it is one if it is named on the command line and has `type:` at its top;
    without that it is another plugin's.
    """
    if file_path.suffix not in RECIPE_SUFFIXES:
        return None
    # The project itself may lie below a folder of that name.
    is_in_folder = RECIPES_DIR in parts_below(file_path, parent.config.rootpath.parent)
    is_named = parent.session.isinitpath(file_path) and _looks_like_one(file_path)
    if not (is_in_folder or is_named):
        return None
    recipe: RecipeFile = RecipeFile.from_parent(parent, path=file_path)
    return recipe


def _looks_like_one(path: Path) -> bool:
    """Return whether a file has the `type` of a recipe."""
    try:
        return _HAS_TYPE.search(path.read_bytes()) is not None
    except OSError:
        return False


class _Marks:
    """Makes the marks of rows: `platform(name="cpu")`, and `cpu` for `-m cpu`."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._made: dict[tuple[str, str], tuple[pytest.Mark, ...]] = {}

    def of(self, workload: Workload) -> list[pytest.Mark]:
        """Return the marks of one row."""
        kinds = {
            "model": workload.model,
            "scope": workload.scope,
            "environment": workload.environment,
            "platform": workload.platform,
            "tag": workload.tag,
        }
        marks = [m for kind, name in kinds.items() if name for m in self._named(kind, name)]
        if workload.disabled_reason is not None:
            marks.append(pytest.mark.skip(reason=workload.disabled_reason).mark)
        if (held := workload.quarantine) is not None:
            marks.append(pytest.mark.quarantine(reason=held.reason, until=held.until).mark)
        return marks

    def _named(self, kind: str, name: str) -> tuple[pytest.Mark, ...]:
        """Return the marks for a word of a row, made once."""
        if (kind, name) not in self._made:
            self._declare(f"{kind}(name): workloads by their {kind}")
            made = [getattr(pytest.mark, kind)(name=name).mark]
            if _PLAIN_MARK(name):
                self._declare(f"{name}: workloads of this {kind}")
                made.append(getattr(pytest.mark, name).mark)
            self._made[kind, name] = tuple(made)
        return self._made[kind, name]

    def _declare(self, line: str) -> None:
        """Declare a mark, so that `--strict-markers` accepts it."""
        if line not in self._config.getini("markers"):
            self._config.addinivalue_line("markers", line)

"""Support of other plugins that keep data of tests in their process, which for gangs is a rank.

Ranks that collect are workers as pytest-xdist's are: plugins detect one by `config.workerinput`.
Of the rest, each function is for one plugin by name and does nothing without it. One line names
those that do less on gangs; docs/reference/other-plugins.md has the table.
"""

from __future__ import annotations

import ast
import fcntl
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from pytest_megatron.gangs.controller import testmon
from pytest_megatron.gangs.ipc.messages import RankConfig
from pytest_megatron.gangs.rank import coverage as measure
from pytest_megatron.runs.layout import seed_of_examples

if TYPE_CHECKING:
    from pytest_megatron.gangs.ipc.messages import RankConfig


CONFIGURE_NODE = "pytest_configure_node"
WORKER_VARIABLE = "PYTEST_XDIST_WORKER"
# Plugins that act for the whole session, in the controller only.
_CONTROLLER_PLUGINS = (
    "pytest_timeout",
    "pytest_rerunfailures",
    "pytest_cov.plugin",
    "allure_pytest.listener",
    "__channelexec__",  # name of the worker of pytest-xdist under execnet
)


@dataclass(eq=False, kw_only=True)
class RankNode:
    """A rank as plugins see a worker of pytest-xdist, its `WorkerController`.

    Attributes:
        config: Configuration of the controller.
        workerinput: `config.workerinput` of the rank.
    """

    config: pytest.Config
    workerinput: dict[str, object]

    @property
    def gateway(self) -> SimpleNamespace:
        """A stand-in with the worker's id."""
        return SimpleNamespace(id=self.workerinput["workerid"])


def configure_node(config: pytest.Config, rank_config: RankConfig, argv: list[str]) -> RankNode:
    """Return the node of a rank that is about to collect, once plugins have configured it.

    Args:
        config: Configuration of the controller.
        rank_config: Configuration of the rank.
        argv: `sys.argv` of the controller.
    """
    node = RankNode(
        config=config,
        workerinput={
            "workerid": f"rank{rank_config.rank}",
            "workercount": rank_config.world_size,
            "testrunuid": rank_config.env.get("TORCHELASTIC_RUN_ID", ""),
            "mainargv": argv,
        },
    )
    manager = config.pluginmanager
    if hasattr(manager.hook, CONFIGURE_NODE):  # pytest-xdist has it
        dropped = [
            plugin
            for plugin in manager.get_plugins()
            if is_of_controller(plugin) or module_of(plugin).startswith("pytest_megatron.")
        ]
        manager.subset_hook_caller(CONFIGURE_NODE, dropped)(node=node)
    node.workerinput |= testmon.input_for_rank(config)
    return node


def encode(values: Mapping[str, object]) -> str:
    """Return values of plugins as a Python literal, which holds bytes and tuples as well.

    Raises:
        pytest.UsageError: A value is not made of plain types.
    """
    for name, value in values.items():
        try:
            ast.literal_eval(repr(value))
        except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
            raise pytest.UsageError(
                f"a plugin sends workers {name!r} as {type(value).__name__}, expected plain types; "
                "turn the plugin off with -p no:NAME"
            ) from error
    return repr(dict(values))


def decode(text: str) -> dict[str, object]:
    """Return the values of `encode`."""
    return cast("dict[str, object]", ast.literal_eval(text))


def is_of_controller(plugin: object) -> bool:
    """Return whether a plugin acts for the whole session, in the controller only."""
    module = module_of(plugin)
    return module in _CONTROLLER_PLUGINS or module.startswith("xdist")


def module_of(plugin: object) -> str:
    """Return the name of a plugin's module, or of its class's module."""
    return str(getattr(plugin, "__name__", type(plugin).__module__))


_INLINE_HARMLESS = {"", "disable", "short-report"}
_ALLURE = "allure_listener"
_RUN_ID = "TORCHELASTIC_RUN_ID"  # the same for all ranks of a run


# In the controller


def lines_on_limits(config: pytest.Config, items: Iterable[pytest.Item]) -> list[str]:
    """Return messages about plugins that do less for tests on gangs.

    Args:
        config: Configuration of the controller.
        items: Items that run on gangs.

    Raises:
        pytest.UsageError: pytest-forked would fork the controller for one of them.
    """
    items, lines = list(items), []
    _refuse_forks(config, items)
    if items and testmon.is_recording(config) and measure.settings_of_running():
        lines.append(
            "coverage: lines that ranks execute are recorded by pytest-testmon alone; run without "
            "--testmon to measure them"
        )
    has_plugin = config.pluginmanager.has_plugin
    flags = {*str(getattr(config.option, "inline_snapshot", None) or "").split(",")}
    are_active = {
        "allure": has_plugin(_ALLURE),
        "inline-snapshot": bool(flags - _INLINE_HARMLESS),
        "pytest-benchmark": has_plugin("benchmark") and _is_used("benchmark", items),
        "syrupy": hasattr(config, "_syrupy") and _is_used("snapshot", items),
    }
    names = [name for name, is_active in are_active.items() if items and is_active]
    if names:
        lines.append(
            f"in part on ranks, as docs/reference/other-plugins.md has it: {', '.join(names)}; "
            f"@pytest.mark.controller runs a test without ranks"
        )
    return lines


def keep_unused_snapshots(config: pytest.Config, items: Iterable[pytest.Item]) -> None:
    """Disable syrupy's search for unused snapshots: it does not see their use in ranks."""
    if not _is_used("snapshot", items) or not hasattr(config, "_syrupy"):
        return
    option = vars(config.option)  # options of several releases; writes were queued before
    option["update_snapshots"] = False
    option["warn_unused_snapshots"] = True
    option["disable_unused_snapshots"] = True


def is_of_phases(plugin: object) -> bool:
    """Return whether a plugin wraps phases, so that it contributed to reports in the ranks."""
    return any(
        hasattr(plugin, f"pytest_{name}")
        for name in ("runtest_setup", "runtest_call", "runtest_teardown", "fixture_setup")
    )


def _refuse_forks(config: pytest.Config, items: Iterable[pytest.Item]) -> None:
    """Refuse pytest-forked for tests on gangs: it would fork the controller.

    Raises:
        pytest.UsageError: It is requested.
    """
    is_asked = getattr(config.option, "forked", False)
    for item in items if config.pluginmanager.has_plugin("pytest_forked") else ():
        if is_asked or item.get_closest_marker("forked") is not None:
            raise pytest.UsageError(
                f"pytest-forked: {item.nodeid} runs on ranks, which are processes of their own; "
                "for new ones use @pytest.mark.isolated, and drop --forked or the mark forked"
            )


def _is_used(fixture: str, items: Iterable[pytest.Item]) -> bool:
    return any(fixture in getattr(item, "fixturenames", ()) for item in items)


# In ranks


def leave_to_controller(config: pytest.Config) -> None:
    """Disable plugins in ranks whose work the controller does, or whose data would be lost."""
    testmon.record_in_rank(config)
    listener = config.pluginmanager.get_plugin(_ALLURE)
    commons = sys.modules.get("allure_commons")
    if listener is not None and commons is not None:
        manager = commons.plugin_manager
        manager.unregister(plugin=listener)
        config.add_cleanup(lambda: manager.register(listener))  # allure unregisters it at the end
    benchmark = getattr(config, "_benchmarksession", None)
    if benchmark is not None:
        benchmark.disabled = True  # each rank would choose another number of rounds
    inline = sys.modules.get("inline_snapshot._global_state")
    if inline is not None:
        inline.state().active = False  # its changes are not written: a wrong value has to fail


def draw_same_examples(rank_config: RankConfig) -> None:
    """Make hypothesis draw the same examples in all ranks, without its database."""
    core = sys.modules.get("hypothesis.core")
    if core is not None and core.global_force_seed is None:
        vars(core)["global_force_seed"] = seed_of_examples(rank_config.env[_RUN_ID])


def notes_on_failure(item: pytest.Item) -> Iterator[tuple[str, str]]:
    """Return sections for the report of a failure: the seed of hypothesis."""
    core = sys.modules.get("hypothesis.core")
    if core is not None and item.get_closest_marker("hypothesis") is not None:
        text = f"--hypothesis-seed={core.global_force_seed} draws the same examples on all ranks"
        yield "hypothesis", text


def write_snapshots(config: pytest.Config, rank_config: RankConfig) -> None:
    """Write changed snapshots of syrupy, one rank at a time, before the process may be killed."""
    session = getattr(config, "_syrupy", None)
    if session is None or not getattr(session, "_queued_snapshot_writes", None):
        return
    lock = os.open(Path(rank_config.log_dir).parents[1], os.O_RDONLY)  # of all gangs' logs
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        session.flush_snapshot_write_queue()
    finally:
        os.close(lock)

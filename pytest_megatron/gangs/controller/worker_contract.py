"""The contract of pytest-xdist between a controller and its workers, for ranks that collect.

Plugins detect a worker by `config.workerinput`, and leave work that is done once to the controller.
They expect the values of their `pytest_configure_node` there, and that the controller's
`pytest_testnodedown` receives their `config.workeroutput`.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

import pytest

from pytest_megatron.gangs.ipc.messages import RankConfig

CONFIGURE_NODE = "pytest_configure_node"
NODE_DOWN = "pytest_testnodedown"
WORKER_VARIABLE = "PYTEST_XDIST_WORKER"
# Plugins that act for the whole session, in the controller only.
_CONTROLLER_PLUGINS = (
    "pytest_timeout",
    "pytest_rerunfailures",
    "pytest_cov.plugin",
    "__channelexec__",  # name of the worker of pytest-xdist under execnet
)


@dataclass(eq=False, kw_only=True)
class RankNode:
    """A rank as plugins see a worker of pytest-xdist, its `WorkerController`.

    Attributes:
        config: Configuration of the controller.
        workerinput: `config.workerinput` of the rank.
        workeroutput: `config.workeroutput` of the rank.
    """

    config: pytest.Config
    workerinput: dict[str, object]
    workeroutput: dict[str, object] = field(default_factory=dict)

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
    _call_plugins(node, CONFIGURE_NODE, {"node": node})
    return node


def node_down(node: RankNode, workeroutput: str, error: str | None) -> None:
    """Call `pytest_testnodedown` with the output of a rank.

    Args:
        node: The rank.
        workeroutput: Text from `encode`; "" if there is none.
        error: Reason why there is none, or None.
    """
    node.workeroutput = decode(workeroutput)
    _call_plugins(node, NODE_DOWN, {"node": node, "error": error})


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
    return cast("dict[str, object]", ast.literal_eval(text)) if text else {}


def is_of_controller(plugin: object) -> bool:
    """Return whether a plugin acts for the whole session, in the controller only."""
    module = module_of(plugin)
    return module in _CONTROLLER_PLUGINS or module.startswith("xdist")


def module_of(plugin: object) -> str:
    """Return the name of a plugin's module, or of its class's module."""
    return str(getattr(plugin, "__name__", type(plugin).__module__))


def _call_plugins(node: RankNode, name: str, arguments: Mapping[str, object]) -> None:
    """Call a hook of pytest-xdist in plugins that are active in ranks."""
    manager = node.config.pluginmanager
    if not hasattr(manager.hook, name):  # without pytest-xdist there is no such hook
        return
    dropped = [
        plugin
        for plugin in manager.get_plugins()
        if is_of_controller(plugin) or module_of(plugin).startswith("pytest_megatron.")
    ]
    manager.subset_hook_caller(name, dropped)(**arguments)

"""The contract of pytest-xdist between a controller and its workers, for ranks that collect.

Plugins know a worker by `config.workerinput`, and then leave to the controller what is done once.
In return they expect what their `pytest_configure_node` put there, and that the controller's
`pytest_testnodedown` is given what they left in `config.workeroutput`.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

import pytest

from pytest_megatron.gang.ipc.messages import RankConfig

CONFIGURE_NODE = "pytest_configure_node"
NODE_DOWN = "pytest_testnodedown"
WORKER_VARIABLE = "PYTEST_XDIST_WORKER"
# Plugins that act for the whole session; in a rank the controller does what they do.
_CONTROLLER_PLUGINS = (
    "pytest_timeout",
    "pytest_rerunfailures",
    "pytest_cov.plugin",
    "__channelexec__",  # the worker of pytest-xdist, which execnet runs under this name
)


@dataclass(eq=False, kw_only=True)
class RankNode:
    """A rank as plugins see a worker of pytest-xdist, its `WorkerController`.

    Attributes:
        config: Of the controller.
        workerinput: What the rank gets as `config.workerinput`.
        workeroutput: What the rank left in `config.workeroutput`.
    """

    config: pytest.Config
    workerinput: dict[str, object]
    workeroutput: dict[str, object] = field(default_factory=dict)

    @property
    def gateway(self) -> SimpleNamespace:
        """A stand-in that knows the worker's id."""
        return SimpleNamespace(id=self.workerinput["workerid"])


def configure_node(config: pytest.Config, rank_config: RankConfig, argv: list[str]) -> RankNode:
    """Return the node of a rank that is about to collect, once plugins have configured it.

    Args:
        config: Of the controller.
        rank_config: Of the rank.
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
    """Give plugins what the process of a rank left for them.

    Args:
        node: The rank.
        workeroutput: As `encode` returned it; "" if the process left nothing.
        error: Why it left nothing, or None.
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
    """Return what was encoded."""
    return cast("dict[str, object]", ast.literal_eval(text)) if text else {}


def is_of_controller(plugin: object) -> bool:
    """Whether a plugin acts for the whole session, and in no rank."""
    module = module_of(plugin)
    return module in _CONTROLLER_PLUGINS or module.startswith("xdist")


def module_of(plugin: object) -> str:
    """Return the name of the module that a plugin is, or whose class it is of."""
    return str(getattr(plugin, "__name__", type(plugin).__module__))


def _call_plugins(node: RankNode, name: str, arguments: Mapping[str, object]) -> None:
    """Call a hook of pytest-xdist in plugins that are in ranks as well."""
    manager = node.config.pluginmanager
    if not hasattr(manager.hook, name):  # without pytest-xdist there is no such hook
        return
    dropped = [
        plugin
        for plugin in manager.get_plugins()
        if is_of_controller(plugin) or module_of(plugin).startswith("pytest_megatron.")
    ]
    manager.subset_hook_caller(name, dropped)(**arguments)

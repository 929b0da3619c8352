"""The `pytest11` entry point: registers the plugin's options and, where asked for, its roles.

Runs at every pytest start, also of people who never use us: must import nothing heavy (no torch,
no pydantic, no yaml) and change nothing while none of our options is given.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_megatron.hooks import options, recipes
from pytest_megatron.hooks.fixtures import (  # noqa: F401 - pytest finds them here
    _megatron_world_size,
    device,
    local_rank,
    model_parallel,
    process_group,
    rank,
    shared_tmp_path,
    world_size,
)
from pytest_megatron.hooks.markers import declare_marks, parametrise_sizes


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options."""
    options.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Register the role that runs workloads, if this session has any."""
    chosen = options.read_options(config)
    if chosen.asks_for_workloads or recipes.are_recipes_asked_for(config):
        from pytest_megatron.hooks.workloads import register_roles  # noqa: PLC0415 - not for all

        register_roles(config, chosen)
    declare_marks(config)
    if chosen.num_nodes > 1 and getattr(config.option, "dist", "no") != "no":
        raise pytest.UsageError("--nnodes: pytest-xdist (-n) runs on one node; drop one of them")
    if chosen.node_rank > 0:
        from pytest_megatron.hooks.nodes import FOLLOWER_NAME, FollowerPlugin  # noqa: PLC0415 - not for all

        config.pluginmanager.register(FollowerPlugin(config, chosen), FOLLOWER_NAME)
    elif chosen.asks_for_gangs:
        from pytest_megatron.hooks.gangs import PLUGIN_NAME, GangPlugin  # noqa: PLC0415 - not for all
        from pytest_megatron.hooks.session import RunSession  # noqa: PLC0415 - not for all

        config.pluginmanager.register(GangPlugin(config, RunSession(config, chosen)), PLUGIN_NAME)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrise tests whose mark names several world sizes."""
    parametrise_sizes(metafunc)


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Collect recipes, in a session that asked for them."""
    if not parent.config.pluginmanager.has_plugin(recipes.PLUGIN_NAME):
        return None
    return recipes.collect_recipe(file_path, parent)

"""Entry point `pytest11`: loads the plugin in a session that asks for it.

Every pytest of the environment imports this module, so it imports pytest and the standard library.
"""

from __future__ import annotations

import importlib
import os
import re
import shlex
from collections.abc import Generator, Iterable, Iterator
from types import ModuleType

import pytest

PLUGIN = "pytest_megatron.plugin"
_NAMES = ("megatron", PLUGIN)
FIXTURES = (
    *("device", "local_rank", "model_parallel", "process_group", "rank"),
    *("shared_tmp_path", "world_size"),
)
_DISTRIBUTION = re.compile(r"pytest[-_.]+megatron(?![-_.]*\w)", re.IGNORECASE)


def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
    """Load the plugin if the command line, the environment or the ini file asks for it."""
    _leave_package_alone(pluginmanager)
    config = pluginmanager.get_plugin("pytestconfig")
    if isinstance(config, pytest.Config) and _asks(config):
        _load(pluginmanager)


def pytest_plugin_registered(plugin: object, manager: pytest.PytestPluginManager) -> None:
    """Load the plugin if another plugin has its name in `pytest_plugins`."""
    if isinstance(plugin, ModuleType) and "megatron" in _listed(
        getattr(plugin, "pytest_plugins", ())
    ):
        _load(manager)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Say of a missing fixture that it is the plugin's, in a session that does not ask for it."""
    report = yield
    missing = getattr(report.longrepr, "argname", None)  # of pytest's FixtureLookupErrorRepr
    if missing in FIXTURES and not item.config.pluginmanager.has_plugin(PLUGIN):
        shown = vars(report.longrepr)
        shown["errorstring"] += (
            f"\n pytest-megatron has a fixture {missing!r}, for sessions that ask for it, with "
            f"-p megatron on the command line or in addopts: {_asking_line(item.config)}"
        )
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_load_initial_conftests(
    early_config: pytest.Config, args: list[str]
) -> Generator[None, object, object]:
    """Refuse options of the plugin, unless a conftest.py declares them."""
    manager = early_config.pluginmanager
    is_late = not manager.has_plugin(PLUGIN)
    result = yield
    plugin = manager.get_plugin(PLUGIN)
    if plugin is None:
        _refuse_options(early_config, args)
    elif is_late:
        raise pytest.UsageError(
            "pytest_plugins of a conftest.py names megatron, which acts before conftest files are "
            "loaded; ask for it with -p megatron, typed or in addopts of the ini file"
        )
    return result


def _leave_package_alone(manager: pytest.PytestPluginManager) -> None:
    """Take back that pytest rewrites assertions in Megatron-LM's package, which `-p` named.

    Nor does it in ours, whose assertions are of no test: modules load faster without it.
    """
    rewriting = vars(manager.rewrite_hook)
    rewriting.get("_must_rewrite", set()).difference_update(("megatron", "pytest_megatron"))
    rewriting.get("_marked_for_rewrite_cache", {}).clear()


def _load(manager: pytest.PytestPluginManager) -> None:
    if not manager.has_plugin(PLUGIN):
        manager.register(importlib.import_module(PLUGIN), PLUGIN)


def _asks(config: pytest.Config) -> bool:
    """Return whether the session asks for the plugin."""
    given = getattr(config, "known_args_namespace", None)
    is_early = given is None  # before pytest reads its ini file it loads plugins by name alone
    words = _plugins_of(config.invocation_params.args) if given is None else given.plugins
    told = [word.strip() for word in words if word.strip().removeprefix("no:") in _NAMES]
    if told:  # the last one wins
        return told[-1] in _NAMES
    if is_early or "megatron" in os.environ.get("PYTEST_PLUGINS", "").split(","):
        return True
    attributes = vars(config)  # the public name of the second one is deprecated from pytest 9.1 on
    in_file = attributes.get("_inicfg", attributes.get("inicfg", ()))
    names = (*in_file, *(getattr(given, "override_ini", None) or ()))
    return any(name.startswith("megatron_") for name in names) or any(
        map(_DISTRIBUTION.match, config.getini("required_plugins"))
    )


def _plugins_of(words: Iterable[object]) -> Iterator[str]:
    """Yield the values of `-p`."""
    is_value = False
    for word in map(str, words):
        if is_value or (word.startswith("-p") and word != "-p"):
            yield word if is_value else word[2:]
        is_value = not is_value and word == "-p"


def _listed(names: object) -> Iterable[object]:
    """Return the names in a value of `pytest_plugins`; pytest refuses other values."""
    if isinstance(names, str):
        return names.split(",")
    return names if isinstance(names, list | tuple | set | frozenset) else ()


def _asking_line(config: pytest.Config) -> str:
    """Return the command line of a session, with what asks for the plugin."""
    return shlex.join(["pytest", "-p", "megatron", *map(str, config.invocation_params.args)])


def _refuse_options(early_config: pytest.Config, arguments: list[str]) -> None:
    """Refuse our options in a session that does not ask for the plugin."""
    missing = object()
    words = [str(argument) for argument in arguments]
    typed = [word.partition("=")[0] for word in words[: (*words, "--").index("--")]]
    unknown = [
        name
        for name in typed
        if name.startswith("--") and early_config.getoption(name, missing) is missing
    ]
    if not unknown:
        return
    from pytest_megatron.session.options import OPTION_ROWS

    ours = {row.name for row in OPTION_ROWS.values()}
    for name in unknown:
        if name[2:].removeprefix("megatron-") in ours:
            line = _asking_line(early_config)
            raise pytest.UsageError(
                f"{name}: nobody declares it; it is an option of pytest-megatron, for which a "
                f"session has to ask, with -p megatron on the command line or in addopts: {line}"
            )

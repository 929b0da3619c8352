"""Finds an engine by name, among our own and those of other packages."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable

from pytest_megatron.engines.api import Engine, EngineContext
from pytest_megatron.engines.local import LocalEngine
from pytest_megatron.errors import LaunchError

GROUP = "pytest_megatron.engines"
LOCAL = LocalEngine.name


def open_engine(name: str, context: EngineContext) -> Engine:
    """Return the engine of that name.

    Raises:
        LaunchError: No package brings one of that name, it cannot be imported, or it refuses its
            configuration.
    """
    if name == LOCAL:
        return LocalEngine(context)
    found = {entry.name: entry for entry in importlib.metadata.entry_points(group=GROUP)}
    if name not in found:
        known = ", ".join(sorted({LOCAL, *found}))
        raise LaunchError(
            "--executor",
            f"unknown engine {name!r}, expected one of {known}; an engine is an entry point of "
            f"the group {GROUP}",
        )
    try:
        make: Callable[[EngineContext], Engine] = found[name].load()
    except (ImportError, AttributeError) as error:
        raise LaunchError(
            "--executor",
            f"the engine {name!r} cannot be loaded ({found[name].value}): {error}; "
            f"reinstall the package that brings it",
        ) from error
    return make(context)

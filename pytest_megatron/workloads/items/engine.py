"""The engine of a session's workloads."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pytest_megatron.session.options import usage_errors
from pytest_megatron.session.state import RunSession
from pytest_megatron.workloads.engine.api import Engine, EngineContext
from pytest_megatron.workloads.engine.local import open_engine

_ENGINE = pytest.StashKey[Engine]()


def engine_of(session: RunSession) -> Engine:
    """Return the engine that `--executor` names; the first call opens it.

    Raises:
        pytest.UsageError: There is no such engine, or it cannot be used as it is set up.
    """
    if _ENGINE not in session.stash:
        file = session.options.executor_config
        context = EngineContext(
            root=session.root,
            run_dir=session.run_dir,
            facts=session.facts,
            env=os.environ,
            config_file=None if file is None else Path(session.directory, file),
            copies_lines="tee-ranks" in session.options.typed,
        )
        with usage_errors(session.shorten):
            session.stash[_ENGINE] = open_engine(session.options.executor, context)
    return session.stash[_ENGINE]


def close_engine(session: RunSession) -> None:
    """Close an engine without a queue, if one was made; one with a queue is closed by its loop."""
    engine = session.stash.get(_ENGINE, None)
    if engine is not None and not engine.is_queue:
        engine.close()

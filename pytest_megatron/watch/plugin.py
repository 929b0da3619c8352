"""A session in a fork of `pytest-megatron watch`, and what it tells about the project."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import pytest

from pytest_megatron.gangs.start.preload import fork_spare, spares
from pytest_megatron.process.tree import end_process
from pytest_megatron.session.options import early_words


class Teller:
    """Tells the root of the project, and what is to be loaded before the next session."""

    def __init__(self, pipe: int) -> None:
        """Take the write end of a pipe."""
        self._pipe = pipe

    @pytest.hookimpl(tryfirst=True)
    def pytest_load_initial_conftests(self, early_config: pytest.Config) -> None:
        """Tell it before a conftest.py can fail."""
        words = early_words(early_config, "preload")
        os.write(self._pipe, json.dumps([str(early_config.rootpath), words]).encode())
        os.close(self._pipe)


def run_session(arguments: Sequence[str], pipe: int) -> NoReturn:
    """Run `python -m pytest` in this process, which is a fork, and end it.

    Args:
        arguments: What was typed behind `watch`.
        pipe: Write end of a pipe, for what is told.
    """
    words = ["-p", "megatron", *arguments]
    sys.argv[:] = [str(Path(pytest.__file__).with_name("__main__.py")), *words]
    spares.append(fork_spare())
    loaded = frozenset(sys.modules)
    exit_code = pytest.main(words, plugins=[Teller(pipe)])
    end_process(exit_code, loaded)

"""A session in a fork of `pytest-megatron watch`, and what it tells about the project."""

from __future__ import annotations

import atexit
import json
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import pytest

from pytest_megatron.session.options import early_words

_BROKEN = 70  # exit code, as of an error in software


class _Teller:
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
    code = _BROKEN
    try:
        code = pytest.main(words, plugins=[_Teller(pipe)])
        atexit._run_exitfuncs()
    except BaseException:  # noqa: BLE001 - it must never go on as its parent
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

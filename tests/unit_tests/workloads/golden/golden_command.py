"""`pytest-megatron golden`, run in the process of the test."""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

import pytest

from pytest_megatron.cli import main


class Ran(NamedTuple):
    """Exit code of a command, and what it printed."""

    code: int
    out: str
    err: str


def run(*arguments: str | Path) -> Ran:
    """Run it to its end."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["pytest-megatron", "golden", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
    code = caught.value.code
    return Ran(code if isinstance(code, int) else 0, out.getvalue(), err.getvalue())

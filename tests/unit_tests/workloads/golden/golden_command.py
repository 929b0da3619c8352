"""`pytest-megatron golden`, run in the process of the test."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pytest_megatron.cli import main


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    """Run it; return its exit code."""
    monkeypatch.setattr(sys, "argv", ["pytest-megatron", "golden", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        main()
    code = caught.value.code
    return code if isinstance(code, int) else 0

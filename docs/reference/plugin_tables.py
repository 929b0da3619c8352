"""Makes the table of plugins of `other-plugins.md` from the cases that try them, for the site."""

# ruff: noqa: INP001 - a script, no package

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path

CASES = Path(__file__).parents[2] / "tests/plugins/plugin_cases.py"


def plugins() -> Iterator[str]:
    """Yield a row for each plugin that was tried."""
    tried = runpy.run_path(str(CASES))
    yield from tried["TABLE_HEAD"]
    yield from sorted(map(tried["row_of"], tried["CASES"]))

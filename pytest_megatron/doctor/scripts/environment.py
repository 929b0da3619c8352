"""Prints what the Python that runs it is, as a line of JSON. Standard library only."""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path

print(  # noqa: T201 - our parent reads it
    json.dumps(
        {
            "executable": sys.executable,
            "version": platform.python_version(),
            "tag": f"cp{sys.version_info[0]}{sys.version_info[1]}",
            "machine": platform.machine(),
            "prefix": sys.prefix,
            "paths": [path or str(Path.cwd()) for path in sys.path],
        }
    )
)

"""Has the page's docker.yaml use this machine's Python: the image of the tests has no files.

The daemon of the tests may not raise limits, as the page explains.
"""

from __future__ import annotations

import sys
from pathlib import Path

root = Path(__file__).parents[2]
paths = dict.fromkeys(("/usr", sys.base_prefix, sys.prefix, str(root)))
mounts = ", ".join(f'"{path}:{path}:ro"' for path in paths)
config = Path("docker.yaml")
text = config.read_text().replace("/opt/venv/bin/python", sys.executable)
config.write_text(text.replace('"/data:/data:ro"', mounts) + "  ulimits: {}\n")

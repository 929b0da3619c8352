"""Guards another guest and waits for it, until it is killed itself."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pytest_megatron.process.guarded import GuardedProcess

with GuardedProcess(
    [sys.executable, sys.argv[1]],
    env={**os.environ, "WAIT": "1"},
    cwd=Path.cwd(),
    output=Path("log"),
    grace_s=1.0,
) as process:
    process.wait()

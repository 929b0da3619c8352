"""Says that it is up, and ends with exit code 5 when it is told to."""

from __future__ import annotations

import os
import signal
import sys


def goodbye(*_: object) -> None:
    print("goodbye", flush=True)
    sys.exit(5)


signal.signal(signal.SIGTERM, goodbye)
print("up", os.getpid(), flush=True)
while True:
    signal.pause()

"""Says that it is up and cannot be ended politely."""

from __future__ import annotations

import os
import signal

signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", os.getpid(), flush=True)
while True:
    signal.pause()

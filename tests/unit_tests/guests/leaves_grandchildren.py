"""Starts two processes in sessions of their own, which hang, and waits for a third of its kind."""

from __future__ import annotations

import os
import subprocess
import sys

SLEEPER = "import os, signal, sys; print('up', os.getpid(), flush=True); signal.pause()"
children = [
    subprocess.Popen(
        [sys.executable, "-c", SLEEPER], start_new_session=True, stdout=subprocess.PIPE, text=True
    )
    for _ in range(2)
]
for child in children:
    assert child.stdout is not None
    print(child.stdout.readline(), end="", flush=True)
if "WAIT" in os.environ:
    children[0].wait()

"""Waits for a child that hangs with faulthandler on."""

from __future__ import annotations

import subprocess
import sys

CHILD = """
import signal
def wait_forever():
    print("up", flush=True)
    signal.pause()
wait_forever()
"""
subprocess.run([sys.executable, "-X", "faulthandler", "-c", CHILD], check=False)

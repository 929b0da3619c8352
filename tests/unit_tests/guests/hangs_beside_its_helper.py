"""Waits for a rank that hangs with faulthandler on, as does a helper that shares its stderr."""

from __future__ import annotations

import os
import subprocess
import sys

HELPER = """
import signal
def helper_waits():
    print("up", flush=True)
    signal.pause()
helper_waits()
"""
RANK = f"""
import subprocess, sys
def rank_waits():
    subprocess.run([sys.executable, "-X", "faulthandler", "-c", {HELPER!r}])
rank_waits()
"""
subprocess.run(
    [sys.executable, "-X", "faulthandler", "-c", RANK],
    env=os.environ | {"LOCAL_RANK": "0"},
    check=False,
)

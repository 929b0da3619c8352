"""Leaves a process with a child and another thread, whose main thread has ended."""

from __future__ import annotations

import signal
import subprocess
import sys

CHILD = "import signal; print('up', flush=True); signal.pause()"
LEFT = f"""
import ctypes, os, subprocess, sys, threading, time
subprocess.Popen([sys.executable, "-c", {CHILD!r}])
threading.Thread(target=time.sleep, args=(2,)).start()
SYS_EXIT = {{"x86_64": 60, "aarch64": 93}}[os.uname().machine]
ctypes.CDLL(None).syscall(SYS_EXIT, 0)
"""
subprocess.Popen([sys.executable, "-c", LEFT], start_new_session=True)
signal.pause()

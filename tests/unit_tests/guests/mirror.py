"""Writes what a training program can see of itself, as JSON, when it is imported."""

from __future__ import annotations

import builtins
import faulthandler
import json
import multiprocessing
import os
import resource
import signal
import sys
import threading
import warnings
from pathlib import Path

program = sys.modules["__main__"]
NUMBERS = sorted(set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP})
found = {
    "argv": sys.argv,
    "orig_argv": sys.orig_argv,
    "path": sys.path,
    "flags": str(sys.flags),
    "executable": sys.executable,
    "main": [
        program.__name__,
        str(program.__file__),
        str(program.__spec__),
        type(program.__loader__).__name__,
        str(program.__package__),
        program.__builtins__ is builtins,
    ],
    "cwd": str(Path.cwd()),
    "env": dict(os.environ),
    "descriptors": sorted(
        [path.name, str(path.readlink())]
        for path in Path("/proc/self/fd").iterdir()
        if path.exists()
    ),
    "signals": {n.name: str(signal.getsignal(n)) for n in NUMBERS},
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "leads a session": os.getsid(0) == os.getpgrp() == os.getpid(),
    "streams": [
        [repr(stream), stream.errors, stream.isatty()] for stream in (sys.stdout, sys.stderr)
    ],
    "limits": {
        name: list(resource.getrlimit(getattr(resource, name)))
        for name in dir(resource)
        if name.startswith("RLIMIT_")
    },
    "niceness": os.nice(0),
    "cpus": sorted(os.sched_getaffinity(0)),
    "umask": os.umask(0o22),
    "threads": [thread.name for thread in threading.enumerate()],
    "process": [
        multiprocessing.current_process().name,
        multiprocessing.get_start_method(allow_none=True),
    ],
    "faulthandler": faulthandler.is_enabled(),
    "warnings": [str(entry) for entry in warnings.filters],
    "excepthook": sys.excepthook is sys.__excepthook__,
    "trace": [sys.gettrace(), sys.getprofile()],
    "has torch": "torch" in sys.modules,
    "recursion": [sys.getrecursionlimit(), sys.getswitchinterval()],
}
name = f"mirror_{os.environ['RANK']}.json"
Path(os.environ["OUTPUT_PATH"], name).write_text(json.dumps(found, default=str))

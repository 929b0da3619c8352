from __future__ import annotations

import subprocess
import sys

import pytest

CASES = [
    pytest.param("pass", "", id="nothing"),
    pytest.param("import numpy; numpy.ones((9, 9)) @ numpy.ones((9, 9))", "", id="numpy's pool"),
    pytest.param("import torch; torch.set_num_threads(1); torch.ones(9).add(1)", "", id="torch"),
    pytest.param(
        "import threading\n"
        "threading.Thread(target=threading.Event().wait, name='mine', daemon=True).start()",
        "threads run since the tests were collected: mine",
        id="a thread of Python's",
    ),
    pytest.param(
        "import _thread, threading; _thread.start_new_thread(threading.Event().wait, ())",
        "threads run since the tests were collected: thread ",
        id="a thread that threading does not know",
    ),
    pytest.param(
        "import ctypes, time\n"
        "import concurrent.futures\n"
        "libc = ctypes.CDLL(None)\n"
        "pause = ctypes.cast(libc.pause, ctypes.c_void_p)\n"
        "libc.pthread_create(ctypes.byref(ctypes.c_ulong()), None, pause, None)",
        "1 threads of libraries run since the tests were collected",
        id="a thread of a library",
    ),
]


@pytest.mark.parametrize(("code", "obstacle"), CASES)
def test_what_hinders_a_fork_is_found(code: str, obstacle: str) -> None:
    module = "pytest_megatron.process.fork_safety"
    ask = f"from {module} import find_obstacle; print(find_obstacle())"
    program = f"{code}\n{ask}\nimport os, sys; sys.stdout.flush(); os._exit(0)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip().startswith(obstacle)
    assert bool(done.stdout.strip()) == bool(obstacle)

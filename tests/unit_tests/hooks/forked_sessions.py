"""Sessions of pytest that are forked from a process which has imported pytest and the plugin.

Both imports are half of what a short session costs. A session is `python -m pytest` from there on,
in its own directory and environment, until it ends; it has an empty stdin.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

LIMIT_S = 300
PROGRAM = """
import gc, json, os, runpy, sys
import pytest_megatron.hooks.workloads.plugin, pytest_megatron.pages.write
pytest_megatron.__doc__ += "PYTEST_DONT_REWRITE"  # it would warn that it is too late for that
gc.freeze()
for line in sys.stdin:
    if pid := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
        continue
    break
else:
    sys.exit()
order = json.loads(line)
os.chdir(order["cwd"])
os.environ.clear()
os.environ.update(order["env"])
for number, name in enumerate((os.devnull, *order["outputs"])):
    os.dup2(os.open(name, os.O_RDWR), number)
sys.path[:1] = [order["cwd"], *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
sys.argv[1:] = order["arguments"]
runpy.run_module("pytest", run_name="__main__", alter_sys=True)
"""


@functools.cache
def _forker() -> subprocess.Popen[str]:
    """Start the process that forks; it ends with this one."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("COV_") and k != "PYTHONPATH"}
    command, pipe = [sys.executable, "-c", PROGRAM], subprocess.PIPE
    process = subprocess.Popen(command, env=kept, stdin=pipe, stdout=pipe, text=True)
    atexit.register(process.communicate)
    return process


def run_session(
    arguments: Sequence[str], cwd: Path, env: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run pytest with exactly this environment to its end."""
    forker = _forker()
    assert forker.stdin is not None
    assert forker.stdout is not None
    with tempfile.TemporaryDirectory() as place:
        outputs = [Path(place, name) for name in ("stdout", "stderr")]
        for output in outputs:
            output.touch()
        order = {"arguments": arguments, "cwd": str(cwd), "env": env, "outputs": outputs}
        forker.stdin.write(json.dumps(order, default=str) + "\n")
        forker.stdin.flush()
        ready, _, _ = select.select([forker.stdout], [], [], LIMIT_S)
        assert ready, f"the session did not end: {order}"
        returncode = int(forker.stdout.readline())
        stdout, stderr = (output.read_text() for output in outputs)
    return subprocess.CompletedProcess(
        args=arguments, returncode=returncode, stdout=stdout, stderr=stderr
    )

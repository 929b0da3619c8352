"""Keeps a lab for as long as somebody holds the other end of its standard input.

    python lab_keeper.py SCRIPT

Each line of input is a command of the script, `start` or `kill-node 2`; the answer is a line of
JSON with its exit code and what it said. At the end of the input, however that came about,
everything that was started here is killed (the keeper adopts daemons, and what jobs and containers
leave) and `SCRIPT clean` removes the files.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import tempfile

import psutil

_PR_SET_CHILD_SUBREAPER = 36
_REAP_S = 0.5


def main(script: str) -> int:
    """Do as the input says, then end everything."""
    if ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        sys.exit("lab_keeper: cannot adopt processes")
    for number in (signal.SIGINT, signal.SIGHUP):  # of the terminal: the holder ends first
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    try:
        serve(script)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end_all()
        run(script, ["clean"])
    return 0


def serve(script: str) -> None:
    """Run commands until nobody can give any more."""
    rest = b""
    while True:
        while not select.select([0], [], [], _REAP_S)[0]:
            reap()
        data = os.read(0, 4096)
        if not data:
            return
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            answer = json.dumps(run(script, line.decode().split()))
            os.write(1, answer.encode() + b"\n")


def run(script: str, words: list[str]) -> dict[str, str | int]:
    """Run one command; daemons that it starts may keep its output open."""
    with tempfile.TemporaryFile() as output:
        done = subprocess.run(
            [script, *words], stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=False
        )
        output.seek(0)
        return {"exit_code": done.returncode, "output": output.read().decode(errors="replace")}


def reap() -> None:
    """Let go of adopted processes that have ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def end_all() -> None:
    """Kill all that was started here, until nothing starts anything more."""
    own = psutil.Process()
    while processes := own.children(recursive=True):
        for process in processes:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(processes, timeout=_REAP_S)
        reap()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

"""Starts one program without ranks, with logs where a launcher has those of rank 0.

Started as a module: `alone LOGS COPIES COMMAND...`. With COPIES 1, its output is copied to stdout
with `[default0]:` before each line. SIGTERM and SIGINT go on to the program. Ends with its exit
code, or 128 and the signal's number. Standard library only.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

_POLL_S = 0.05
_NOT_FOUND = 127
# As RANK, which the program must not see, for whoever looks for the ranks of a launcher.
VARIABLE = "PYTEST_MEGATRON_RANK"


def main(arguments: Sequence[str]) -> int:
    """Start, copy and end the program."""
    directory = Path(arguments[0], "alone_0", "attempt_0", "0")
    is_copied, command = arguments[1] == "1", arguments[2:]
    directory.mkdir(parents=True)
    logs = [directory / "stdout.log", directory / "stderr.log"]
    with logs[0].open("wb") as stdout, logs[1].open("wb") as stderr:
        # The environment of the interpreter may not be activated; its programs come last.
        path = os.pathsep.join(
            (os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent))
        )
        env = {**os.environ, "PATH": path, VARIABLE: "0"}
        try:
            program = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, env=env
            )
        except OSError as error:
            text = f"{type(error).__name__}: {error.strerror}: {command[0]!r}\n"
            stderr.write(text.encode())
            return _NOT_FOUND

    def stop(number: int, _frame: FrameType | None) -> None:
        program.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    copied = [log.open("rb") for log in logs] if is_copied else []
    rests = [b""] * len(copied)
    while True:
        code = program.poll()
        for index, file in enumerate(copied):
            *lines, rests[index] = (rests[index] + file.read()).split(b"\n")
            lines += [rests[index]] if code is not None and rests[index] else []
            for line in lines:
                sys.stdout.buffer.write(b"[default0]:" + line + b"\n")
        sys.stdout.buffer.flush()
        if code is not None:
            break
        time.sleep(_POLL_S)
    if code:  # as torch's agent says it
        what = f"failed (exitcode: {code}) local_rank: 0 (pid: {program.pid}) of binary: "
        sys.stdout.write(f"{what}{command[0]}\n")
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Process in a container: the worker, and a watch over the container's owner.

Started as `python -m pytest_megatron.engines.docker.inside JOB_DIR`, below nemo-run's bash. JOB_DIR
holds `spec.json` and `lifeline`, a file that the Docker engine's child process on the host keeps
locked. The kernel releases the lock when that process ends, however it ends; then nothing would
remove this container, and it exits.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import itertools
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

from pytest_megatron.base.files import write_json_atomically
from pytest_megatron.engines import worker
from pytest_megatron.workloads.engine.records import read_spec

GRACE_S = 20.0  # for the worker to end a training and to write its record


def main(arguments: list[str]) -> int:
    """Run the worker; return its exit code."""
    job_dir = Path(arguments[0])
    is_watched = _watch(job_dir / "lifeline")
    version = importlib.metadata.version("pytest-megatron")
    write_json_atomically(job_dir / "began.json", {"version": version, "is_watched": is_watched})
    _need_home()
    try:
        return worker.main([str(job_dir / "spec.json")])
    finally:
        _hand_over(job_dir)


def _watch(lifeline: Path) -> bool:
    """Have the container end when its owner does; return False where locks do not cross over."""
    descriptor = os.open(lifeline, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        threading.Thread(target=_end_with_owner, args=(descriptor,), daemon=True).start()
        return True
    return False  # a virtual machine lies between: the owner cannot have gone so soon


def _end_with_owner(lifeline: int) -> None:
    """End the container when the process that owns it is gone."""
    fcntl.flock(lifeline, fcntl.LOCK_SH)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    if "docker.inside" in Path("/proc/1/cmdline").read_text(errors="replace"):
        os.kill(-1, signal.SIGKILL)  # never where process 1 is the host's


def _need_home() -> None:
    """Give programs a home directory: a user by number only has `/`, which is not theirs."""
    home = os.environ.get("HOME", "/")
    if home == "/" or not os.access(home, os.W_OK):
        os.environ["HOME"] = tempfile.mkdtemp(prefix="home-")


def _hand_over(job_dir: Path) -> None:
    """Give the files to the user for whom the container ran as root."""
    owner = (job_dir / "lifeline").stat()
    if os.getuid() != 0 or owner.st_uid == 0:
        return
    attempt = read_spec(job_dir / "spec.json").plan.dirs.root
    above = itertools.takewhile(lambda path: path.stat().st_uid == 0, attempt.parents)
    for path in (*above, attempt, *attempt.rglob("*"), job_dir, *job_dir.rglob("*")):
        os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

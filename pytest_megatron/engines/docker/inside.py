"""Process in a container: the worker, and what it needs there.

Started as `python -m pytest_megatron.engines.docker.inside JOB_DIR`. JOB_DIR holds `spec.json`.
"""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
from pathlib import Path

from pytest_megatron.engines import worker
from pytest_megatron.workloads.engine.records import read_spec


def main(arguments: list[str]) -> int:
    """Run the worker; return its exit code."""
    job_dir = Path(arguments[0])
    (job_dir / "began").touch()
    _need_home()
    try:
        return worker.main([str(job_dir / "spec.json")])
    finally:
        _hand_over(job_dir)


def _need_home() -> None:
    """Give programs a home directory: a user by number only has `/`, which is not theirs."""
    home = os.environ.get("HOME", "/")
    if home == "/" or not os.access(home, os.W_OK):
        os.environ["HOME"] = tempfile.mkdtemp(prefix="home-")


def _hand_over(job_dir: Path) -> None:
    """Give the files to the user for whom the container ran as root."""
    owner = (job_dir / "spec.json").stat()
    if os.getuid() != 0 or owner.st_uid == 0:
        return
    attempt = read_spec(job_dir / "spec.json").plan.dirs.root
    above = itertools.takewhile(lambda path: path.stat().st_uid == 0, attempt.parents)
    for path in (*above, attempt, *attempt.rglob("*"), job_dir, *job_dir.rglob("*")):
        os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

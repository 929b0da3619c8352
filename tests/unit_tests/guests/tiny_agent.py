"""Starts, copies and ends ranks as `torch.distributed.run --standalone` does, without torch.

Importing torch is most of what the start of a training costs. `test_tiny_agent.py` compares both.
Ranks find no torch either, unless the variable `TINY_AGENT_ALONE` is set.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

POLL_S = 0.02
SETTLE_S = 0.3  # for other ranks that are about to end too, on a busy machine
GRACE_S = 30.0
SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")


class Rank:
    """One rank, in a session of its own."""

    def __init__(self, number: int, command: list[str], env: dict[str, str], logs: Path) -> None:
        self.number = number
        self.logs = logs
        logs.mkdir(parents=True)
        with (logs / "stdout.log").open("w") as stdout, (logs / "stderr.log").open("w") as stderr:
            self.process = subprocess.Popen(
                command, env=env, stdout=stdout, stderr=stderr, start_new_session=True
            )
        self.ended_at = ""

    def poll(self) -> int | None:
        code = self.process.poll()
        if code is not None and not self.ended_at:
            self.ended_at = time.strftime("%Y-%m-%d_%H:%M:%S")
        return code

    def end(self) -> None:
        """Have it end within the grace."""
        for number, wait_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, None)):
            if self.poll() is None:
                os.killpg(self.process.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(wait_s)
        self.poll()

    @property
    def row(self) -> str:
        """The rank in the table of failures."""
        code = self.poll() or 0
        name = f"({signal.Signals(-code).name})" if code < 0 else ""
        return (
            f"  time      : {self.ended_at}\n  host      : localhost\n"
            f"  rank      : {self.number} (local_rank: {self.number})\n"
            f"  exitcode  : {code} (pid: {self.process.pid}) {name}\n"
            "  error_file: <N/A>\n"
            "  traceback : To enable traceback see: "
            "https://pytorch.org/docs/stable/elastic/errors.html\n"
        )


def copy_lines(rank: Rank, name: str, ended: threading.Event) -> None:
    """Copy a log of a rank to stdout or stderr while it grows."""
    stream = getattr(sys, name)
    with (rank.logs / f"{name}.log").open(errors="replace") as log:
        while True:
            is_last = ended.is_set()
            for line in log:
                print(f"[default{rank.number}]:{line}", end="", file=stream, flush=True)
            if is_last:
                return
            ended.wait(POLL_S)


def wait(ranks: list[Rank]) -> Rank | None:
    """Return the first rank that failed, once all others were ended, or None."""
    while any(rank.poll() is None for rank in ranks):
        if failed := [rank for rank in ranks if rank.poll()]:
            time.sleep(SETTLE_S)
            for rank in ranks:
                rank.end()
            return failed[0]
        time.sleep(POLL_S)
    return next((rank for rank in ranks if rank.poll()), None)


def report(program: str, failed: Rank, ranks: list[Rank]) -> None:
    """Print the table of failures."""
    others = [rank.row for rank in ranks if rank.poll() and rank is not failed]
    rows = "".join(f"[{number}]:\n{row}" for number, row in enumerate(others, start=1))
    failures = rows or "  <NO_OTHER_FAILURES>\n"
    print(
        f"failed (exitcode: {failed.poll()}) local_rank: {failed.number} "
        f"(pid: {failed.process.pid}) of binary: {sys.executable}\n"
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
        f"{'=' * 60}\n{program} FAILED\n{'-' * 60}\n"
        f"Failures:\n{failures}{'-' * 60}\n"
        f"Root Cause (first observed failure):\n[0]:\n{failed.row}{'=' * 60}",
        file=sys.stderr,
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    option = parser.add_argument
    option("--standalone", action="store_true", required=True)
    option("--local-addr", choices=["127.0.0.1"], default="127.0.0.1")
    option("--max-restarts", choices=["0"], required=True)
    option("--nproc-per-node", type=int, required=True)
    option("--log-dir", type=Path, required=True)
    option("--redirects", choices=["3"], required=True)
    option("--tee", default="")
    option("--no-python", action="store_true")
    option("-m", dest="is_module", action="store_true")
    option("program", nargs=argparse.REMAINDER)
    return parser.parse_args()


def env_of(rank: int, size: int, port: int, elastic: Mapping[str, object]) -> dict[str, str]:
    """Return the environment of a rank."""
    own = {
        **dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), rank),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), size),
        "GROUP_RANK": 0,
        "GROUP_WORLD_SIZE": 1,
        "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        **{f"TORCHELASTIC_{name}": value for name, value in elastic.items()},
    }
    defaults = {"OMP_NUM_THREADS": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    env = defaults | os.environ | {name: str(value) for name, value in own.items()}
    if "TINY_AGENT_ALONE" in env:
        own_folder = str(Path(__file__).parents[2])
        folders = env["PYTHONPATH"].split(os.pathsep)
        env["PYTHONPATH"] = os.pathsep.join(f for f in folders if f != own_folder)
    return env


def main() -> int:
    args = parse()
    run_id = str(uuid.uuid4())
    attempt = args.log_dir / f"{run_id}_tiny" / "attempt_0"
    python = [] if args.no_python else [sys.executable, "-u"]
    command = [*python, *(["-m"] if args.is_module else []), *args.program]
    size = args.nproc_per_node
    elastic = {
        "RUN_ID": run_id,
        "RESTART_COUNT": 0,
        "MAX_RESTARTS": 0,
        "USE_AGENT_STORE": True,
        "SIGNALS_TO_HANDLE": ",".join(SIGNALS),
    }
    ranks: list[Rank] = []

    def stop(number: int, _frame: FrameType | None) -> None:
        for rank in ranks:
            rank.end()
        sys.exit(f"SignalException: Process {os.getpid()} got signal: {number}")

    for name in SIGNALS:
        signal.signal(signal.Signals[name], stop)
    with socket.create_server(("localhost", 0)) as store:
        for number in range(size):
            logs = attempt / str(number)
            elastic["ERROR_FILE"] = logs / "error.json"
            env = env_of(number, size, store.getsockname()[1], elastic)
            ranks.append(Rank(number, command, env, logs))
        ended = threading.Event()
        copied = [ranks[int(word.partition(":")[0])] for word in args.tee.split(",") if word]
        copiers = [
            threading.Thread(target=copy_lines, args=(rank, name, ended), daemon=True)
            for rank in copied
            for name in ("stdout", "stderr")
        ]
        for copier in copiers:
            copier.start()
        try:
            failed = wait(ranks)
        finally:
            ended.set()
            for copier in copiers:
                copier.join()
    if failed is None:
        return 0
    report(args.program[0], failed, ranks)
    return 1


if __name__ == "__main__":
    sys.exit(main())

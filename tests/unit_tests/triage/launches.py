"""Lays down what launches leave: torch's layout, its agent's table, tracebacks, as they are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pytest_megatron.runs.record import RecordedDiagnosis
from pytest_megatron.triage.api import triage

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp"
LOST = f"RuntimeError: {GLOO}/pair.cc:553] Connection closed by peer [127.0.0.1]:6824."
WAITED = f"RuntimeError: {GLOO}/unbound_buffer.cc:78] Timed out waiting 4000ms for recv operation"
PORT_TAKEN = (  # as Python's socket.create_server says it; the kernel had handed out that port
    "OSError: [Errno 98] Address already in use (while attempting to bind on address "
    "('127.0.0.1', 45123))"
)
TIMES = {"-15": "(SIGTERM)", "-9": "(SIGKILL)", "-11": "(SIGSEGV)", "-6": "(SIGABRT)"}
IT = " iteration {n:8d}/      20 | lm loss: 1.9E+00 | number of nan iterations: 0 |\n"


def iterations(last: int = 6) -> str:
    return "".join(IT.format(n=n) for n in range(1, last + 1))


def traceback(message: str, *, call: str = "all_reduce") -> str:
    return (
        "Traceback (most recent call last):\n"
        '  File "/job/train.py", line 31, in <module>\n'
        "    main()\n"
        '  File "/job/train.py", line 12, in step\n'
        "    dist.all_reduce(x)\n"
        '  File "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", '
        f"line 3252, in {call}\n"
        "    work.wait()\n"
        f"{message}\n"
    )


def table(codes: Mapping[int, int], *, first: int) -> str:
    """What torch's agent writes, torch 2.11."""

    def row(number: int, rank: int) -> str:
        code = codes[rank]
        return (
            f"[{number}]:\n  time      : 2026-11-21_09:35:01\n  host      : node1\n"
            f"  rank      : {rank} (local_rank: {rank})\n"
            f"  exitcode  : {code} (pid: {100 + rank}) {TIMES.get(str(code), '')}\n"
            "  error_file: <N/A>\n  traceback : To enable traceback see: https://pytorch.org/docs\n"
        )

    others = [rank for rank in codes if rank != first]
    rows = "".join(row(number, rank) for number, rank in enumerate(others, start=1))
    failures = rows or "  <NO_OTHER_FAILURES>\n"
    return (
        "E1121 09:35:01.854000 99 torch/distributed/elastic/multiprocessing/api.py:1002] failed "
        f"(exitcode: {codes[first]}) local_rank: {first} (pid: {100 + first}) of binary: python\n"
        "Traceback (most recent call last):\n"
        '  File "/venv/lib/python3.11/site-packages/torch/distributed/run.py", line 1028, in main\n'
        "    run(args)\n"
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
        f"{'=' * 60}\ntrain.py FAILED\n{'-' * 60}\nFailures:\n{failures}"
        f"{'-' * 60}\nRoot Cause (first observed failure):\n{row(0, first)}{'=' * 60}\n"
    )


@dataclass(slots=True)
class Launch:
    """Files of one launch in torch's layout."""

    root: Path
    num_ranks: int = 4
    directory: str = "logs/none_x/attempt_0"

    def __post_init__(self) -> None:
        for rank in range(self.num_ranks):
            self.write(rank, stdout=iterations())

    def write(self, rank: int, stderr: str = "", stdout: str | None = None) -> None:
        directory = self.root / self.directory / str(rank)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "stderr.log").write_text(stderr)
        if stdout is not None:
            (directory / "stdout.log").write_text(stdout)

    def raises(self, rank: int, message: str, **where: str) -> None:
        self.write(rank, traceback(message, **where))

    def error_file(self, rank: int, message: str, timestamp: int) -> None:
        content = {"message": {"message": message, "extraInfo": {"timestamp": str(timestamp)}}}
        path = self.root / self.directory / str(rank) / "error.json"
        path.write_text(json.dumps(content))

    def launcher(self, text: str = "") -> None:
        (self.root / "launcher.log").write_text(text)

    def ends(self, codes: Mapping[int, int], *, first: int) -> None:
        self.launcher(table(codes, first=first))


def diagnosed(root: Path) -> RecordedDiagnosis:
    (group,) = triage([root]).groups
    return group.first


def told(root: Path) -> tuple[str | None, int | None, bool]:
    """Family, root rank, transient or not."""
    found = diagnosed(root)
    return found.family, found.root_rank, found.transient

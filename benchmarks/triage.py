"""Measures triage of a large run against `grep -F` with the same literals, in one run.

    .venv/bin/python benchmarks/triage.py [--ranks 8] [--megabytes 200] [--rounds 3]

Writes the logs of a training that ends in an out-of-memory error on one rank, in torch's layout,
into a temporary directory; then GNU grep, our scan and the whole command take turns over the same
files, which the page cache holds by then. Prints the median of each, its throughput, the ratio to
grep, and the peak memory of its process.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_megatron.triage.signatures import builtin_table

GUILTY = 5
BLOCK_BYTES = 4 << 20
SCAN = """
import sys
from pathlib import Path
from pytest_megatron.triage.gather import make_scanner
from pytest_megatron.triage.signatures import builtin_table
scanner = make_scanner(builtin_table())
print(sum(len(scanner.find(Path(name))) for name in sys.argv[1:]))
"""
COMMAND = "import sys; from pytest_megatron.cli import main; sys.exit(main())"
OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 5 has a total "
    "capacity of 79.11 GiB of which 1.02 GiB is free. Including non-PyTorch memory, this process "
    "has 78.08 GiB memory in use."
)
AFTER = "[rank{rank}]:[E Watchdog] NCCL communicator was aborted on rank {rank}: ncclRemoteError"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One command, run once."""

    seconds: float
    peak_bytes: int
    output: str


def main() -> None:
    """Write, take turns, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--megabytes", type=int, default=200, help="of each rank")
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="triage-benchmark-") as name:
        measure(Path(name), asked.ranks, asked.megabytes, asked.rounds)


def measure(directory: Path, num_ranks: int, megabytes: int, num_rounds: int) -> None:
    """Write the logs, let the rivals take turns, and print."""
    logs = write_logs(directory / "logs", num_ranks, megabytes << 20)
    literals = sorted({text for row in builtin_table().lines for text in row.literals})
    patterns = directory / "patterns"
    patterns.write_text("".join(f"{text}\n" for text in literals))
    files = list(map(str, logs))
    rivals = {
        "grep -F -c -f patterns": ["grep", "-F", "-c", "-f", str(patterns), *files],
        "our scan": [sys.executable, "-c", SCAN, *files],
        "pytest-megatron triage": [
            sys.executable,
            "-c",
            COMMAND,
            "triage",
            str(directory / "logs"),
        ],
    }
    runs: dict[str, list[Run]] = {name: [] for name in rivals}
    for _ in range(num_rounds):
        for name, command in rivals.items():
            runs[name].append(run(command))
    num_bytes = sum(path.stat().st_size for path in logs)
    print(f"{num_ranks} ranks x {megabytes} MB, {len(literals)} literals, {num_rounds} rounds")
    report(runs, num_bytes)
    print(runs["pytest-megatron triage"][0].output.strip().splitlines()[0])


def report(runs: Mapping[str, Sequence[Run]], num_bytes: int) -> None:
    """Print a line for each rival; the first is what the others are held against."""
    first = statistics.median(run.seconds for run in next(iter(runs.values())))
    for name, found in runs.items():
        seconds = statistics.median(run.seconds for run in found)
        peak_mb = max(run.peak_bytes for run in found) / 1e6
        print(
            f"{name:24} {seconds:7.2f} s  {num_bytes / 1e6 / seconds:6.0f} MB/s  "
            f"{first / seconds:5.2f} x grep  {peak_mb:5.0f} MB"
        )


def run(command: Sequence[str]) -> Run:
    """Run a command, and watch the peak of its memory; what it was forked from does not count."""
    with tempfile.TemporaryFile() as output:
        started = time.perf_counter()
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "LC_ALL": "C.UTF-8"},
        )
        peak_bytes = 0
        while process.poll() is None:
            peak_bytes = max(peak_bytes, high_water(process.pid))
            time.sleep(0.01)
        seconds = time.perf_counter() - started
        output.seek(0)
        text = output.read().decode(errors="replace")
    return Run(seconds=seconds, peak_bytes=peak_bytes, output=text)


def high_water(pid: int) -> int:
    """Return the peak memory of a process so far, in bytes; 0 once it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


def write_logs(directory: Path, num_ranks: int, num_bytes: int) -> list[Path]:
    """Write `<rank>/{stdout,stderr}.log`; returns the large ones."""
    paths = []
    for rank in range(num_ranks):
        home = directory / str(rank)
        home.mkdir(parents=True)
        block = usual_lines(rank)
        with (home / "stdout.log").open("wb") as file:
            for _ in range(num_bytes // len(block)):
                file.write(block)
        text = AFTER.format(rank=rank) if rank != GUILTY % num_ranks else traceback(rank)
        (home / "stderr.log").write_text(text + "\n")
        paths.append(home / "stdout.log")
    return paths


def traceback(rank: int) -> str:
    """Return what the guilty rank ends with."""
    lines = [
        "Traceback (most recent call last):",
        '  File "/opt/megatron-lm/pretrain_gpt.py", line 210, in <module>',
        "    pretrain(train_valid_test_datasets_provider, model_provider, forward_step)",
        '  File "/opt/megatron-lm/megatron/training/training.py", line 1702, in train_step',
        "    losses_reduced = forward_backward_func(forward_step_func=forward_step_func)",
        OOM,
    ]
    return "\n".join(f"[rank{rank}]: {line}" for line in lines)


def usual_lines(rank: int) -> bytes:
    """Return a piece of what a training with `NCCL_DEBUG=INFO` prints all day."""
    chance = random.Random(rank)
    lines: list[str] = []
    size = 0
    while size < BLOCK_BYTES:
        lines.append(usual_line(chance, rank, len(lines)))
        size += len(lines[-1]) + 1
    return ("\n".join(lines) + "\n").encode()


def usual_line(chance: random.Random, rank: int, number: int) -> str:
    """Return one line."""
    host = f"node{rank // 8:03}:{4000 + rank}:{4100 + rank}"
    time_now = f"09:{number % 60:02}"
    step_ms, optimizer_ms = chance.gauss(800, 9), chance.gauss(30, 1)
    iteration = (
        f" [2026-11-21 {time_now}:00] iteration {number:8}/  500000 | consumed samples: "
        f"{number * 512:12} | elapsed time per iteration (ms): {step_ms:.1f} | learning rate: "
        f"1.500000E-04 | global batch size:   512 | lm loss: {2 + chance.random():.6E} | loss "
        f"scale: 1.0 | grad norm: {chance.random():.3f} | number of skipped iterations:   0 | "
        f"number of nan iterations:   0 |"
    )
    channel = (
        f"{host} [{rank}] NCCL INFO Channel {number % 24:02}/0 : {rank}[{rank}] -> "
        f"{(rank + 1) % 8}[{(rank + 1) % 8}] via P2P/CUMEM/read"
    )
    collective = (
        f"{host} [{rank}] NCCL INFO AllReduce: opCount {number:x} sendbuff "
        f"0x{chance.getrandbits(40):x} recvbuff 0x{chance.getrandbits(40):x} count "
        f"{chance.randrange(1 << 24)} datatype 9 op 0 root 0 comm 0x55d0c0 [nranks=8] stream 0x7f"
    )
    compiler = (
        f"[rank{rank}]:W1121 {time_now}:11.123000 {4000 + rank} torch/_dynamo/convert_frame.py:906]"
        f" [0/8] recompile_limit reached for step {number}"
    )
    timers = (
        f"(min, max) time across ranks (ms): forward-backward: ({step_ms - 99:.2f}, "
        f"{step_ms - 90:.2f}) optimizer: ({optimizer_ms:.2f}, 31.20)"
    )
    memory = (
        f"[Rank {rank}] (after {number} iterations) memory (MB) | allocated: 41201.2 | max "
        f"allocated: 60113.9 | reserved: 64120.0 | max reserved: 64120.0"
    )
    kinds = (iteration, channel, collective, compiler, timers, memory)
    return chance.choices(kinds, weights=(20, 25, 40, 5, 5, 5))[0]


if __name__ == "__main__":
    main()

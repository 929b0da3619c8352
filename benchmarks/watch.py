"""One edited test of two ranks, until its session has ended: `python benchmarks/watch.py`.

By `pytest-megatron watch`, by a new session of pytest, and by `torch.distributed.run -m pytest`, in
turns; for a suite that does not read `RANK` while it is imported, and for one that does.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

TEST = """\
import os
import pytest
import torch
import torch.distributed as dist


@pytest.fixture
def group():
    device = "{device}"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    yield device
    dist.destroy_process_group()


def test_one(group):
    value = torch.ones(1, device=group)
    dist.all_reduce(value)
    assert value.item() == dist.get_world_size(), "edit {number}"
"""
READS_RANK = "import os\n\nRANK = int(os.environ.get('RANK', '0'))\n"
PATH = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
QUIET = ("-q", "-p", "no:cacheprovider")
WAITING = "watch: waiting for a change"


def write(directory: Path, device: str, number: int) -> None:
    """Edit the test."""
    (directory / "test_sum.py").write_text(TEST.format(device=device, number=number))


def seconds(directory: Path, *words: str) -> float:
    """Return how long a command takes."""
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=directory, capture_output=True, check=False
    )
    taken = time.perf_counter() - started
    if done.returncode:
        raise SystemExit(done.stdout.decode() + done.stderr.decode())
    return taken


def wait(shown: Iterator[str]) -> None:
    """Wait until `watch` waits."""
    for line in shown:
        if " failed" in line or "error" in line:
            raise SystemExit(line)
        if line.startswith(WAITING):
            return
    raise SystemExit("watch has ended")


def measure(directory: Path, num_ranks: int, device: str, num_rounds: int) -> None:
    """Print the median of each way."""
    ours = [*QUIET, "--ranks", str(num_ranks), "--device", device]
    launch = ("torch.distributed.run", f"--nproc-per-node={num_ranks}", "-m", "pytest", *QUIET)
    found: dict[str, list[float]] = {"watch": [], "a new session": [], "torch.distributed.run": []}
    write(directory, device, 0)
    command = [shutil.which("pytest-megatron", path=PATH) or "pytest-megatron", "watch", *ours]
    with subprocess.Popen(command, cwd=directory, stdout=subprocess.PIPE, text=True) as watch:
        assert watch.stdout is not None
        wait(watch.stdout)
        for number in range(1, num_rounds + 1):
            started = time.perf_counter()
            write(directory, device, number)
            wait(watch.stdout)
            found["watch"].append(time.perf_counter() - started)
            found["a new session"].append(seconds(directory, "pytest", "-p", "megatron", *ours))
            found["torch.distributed.run"].append(seconds(directory, *launch))
        watch.terminate()
    for name, times in found.items():
        least, most = min(times), max(times)
        print(f"  {name}: {statistics.median(times):.2f} s ({least:.2f} to {most:.2f})", flush=True)


def main() -> None:
    """Run the comparison for both suites."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    for title, conftest in (("ranks are forked", ""), ("each rank collects", READS_RANK)):
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            (directory / "pytest.ini").write_text("[pytest]\n")
            (directory / "conftest.py").write_text(conftest)
            print(f"{title}, {given.ranks} ranks on {given.device}", flush=True)
            measure(directory, given.ranks, given.device, given.rounds)


if __name__ == "__main__":
    main()

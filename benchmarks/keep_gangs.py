"""One test run again after an edit, on kept gangs: `python benchmarks/keep_gangs.py`.

Beside the same on gangs that start anew, and under `torch.distributed.run`, in turns; for a suite
that does not read `RANK` while it is imported, and for one that does.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pytest_megatron.gang.kept import list_kept

TESTS = """\
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


def test_other():
    pass
"""
READS_RANK = "import os\n\nRANK = int(os.environ['RANK'])\n"
BASE = [sys.executable, "-m"]
PYTEST = ["pytest", "-q", "-p", "no:cacheprovider", "-k", "test_one"]


def seconds(directory: Path, *arguments: str) -> float:
    """Return how long a command takes, from start to end, as a user sees it."""
    started = time.perf_counter()
    done = subprocess.run(
        [*BASE, *arguments], cwd=directory, check=False, capture_output=True, text=True
    )
    took_s = time.perf_counter() - started
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return took_s


def measure(directory: Path, num_ranks: int, device: str, num_rounds: int) -> None:
    """Print the medians of all ways."""
    ours = [*PYTEST, "-p", "megatron", "--ranks", str(num_ranks), "--device", device]
    ways = {
        "kept": [*ours, "--keep-gangs=30"],
        "kept, only collecting": [*ours, "--keep-gangs=30", "--collect-only"],
        "not kept": ours,
        "not kept, only collecting": [*ours, "--collect-only"],
        "torch.distributed.run": [
            *("torch.distributed.run", f"--nproc-per-node={num_ranks}", "-m"),
            *(*PYTEST, "-p", "no:megatron"),
        ],
    }
    seconds(directory, *ways["kept"])
    while not list_kept():
        time.sleep(0.1)
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(num_rounds):
        (directory / "test_sum.py").write_text(TESTS.format(device=device, number=number))
        for name, arguments in ways.items():
            found[name].append(seconds(directory, *arguments))
    for _, kept in list_kept():
        kept.stop()
    medians = {name: statistics.median(times) for name, times in found.items()}
    for name, median in medians.items():
        least, most = min(found[name]), max(found[name])
        print(f"  {name}: {median:.2f} s ({least:.2f} to {most:.2f})")
    beyond = medians["kept"] - medians["kept, only collecting"]
    ratio = medians["kept"] / medians["torch.distributed.run"]
    print(f"  kept beyond collecting: {beyond:.2f} s; {ratio:.2f} of torch.distributed.run")


def main() -> None:
    """Run the comparison for both suites."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    for title, conftest in (("ranks are forked", ""), ("each rank collects", READS_RANK)):
        with tempfile.TemporaryDirectory() as name:
            os.environ["XDG_RUNTIME_DIR"] = name
            directory = Path(name)
            (directory / "pytest.ini").write_text("[pytest]\n")
            (directory / "conftest.py").write_text(conftest)
            (directory / "test_sum.py").write_text(TESTS.format(device=given.device, number="-"))
            print(f"{title}, {given.ranks} ranks on {given.device}")
            measure(directory, given.ranks, given.device, given.rounds)


if __name__ == "__main__":
    main()

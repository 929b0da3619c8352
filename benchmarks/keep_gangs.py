"""One test run again after an edit, on kept gangs: `python benchmarks/keep_gangs.py`.

Beside the same on gangs that start anew, and under `torch.distributed.run`, in turns; for a suite
that does not read `RANK` while it is imported, and for one that does. Times are those of the whole
run, and until its first collective has ended.
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

from pytest_megatron.gangs.start.kept import list_kept

TESTS = """\
import os
import time
from pathlib import Path

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
    Path(__file__).with_name("reduced").write_text(str(time.time()))


def test_other():
    pass
"""
READS_RANK = "import os\n\nRANK = int(os.environ['RANK'])\n"
BASE = [sys.executable, "-m"]
PYTEST = ["pytest", "-q", "-k", "test_one"]


def seconds(directory: Path, *arguments: str) -> tuple[float, float]:
    """Return how long a command takes, as a user sees it, to the first collective and in all."""
    reduced = directory / "reduced"
    reduced.unlink(missing_ok=True)
    started = time.time()
    done = subprocess.run(
        [*BASE, *arguments], cwd=directory, check=False, capture_output=True, text=True
    )
    took_s = time.time() - started
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return float(reduced.read_text()) - started if reduced.exists() else 0.0, took_s


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
            *(*PYTEST, "-p", "no:megatron", "-p", "no:cacheprovider"),
        ],
    }
    seconds(directory, *ways["kept"])
    while not any(kept.address for _, kept in list_kept()):
        time.sleep(0.1)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for number in range(num_rounds):
        (directory / "test_sum.py").write_text(TESTS.format(device=device, number=number))
        for name, arguments in ways.items():
            found[name].append(seconds(directory, *arguments))
    for _, kept in list_kept():
        kept.stop()
    medians = {name: statistics.median(s for _, s in times) for name, times in found.items()}
    first = {name: statistics.median(s for s, _ in times) for name, times in found.items()}
    for name, median in medians.items():
        least, most = min(s for _, s in found[name]), max(s for _, s in found[name])
        until = f", first collective after {first[name]:.2f} s" if first[name] else ""
        print(f"  {name}: {median:.2f} s ({least:.2f} to {most:.2f}){until}")
    beyond = medians["kept"] - medians["kept, only collecting"]
    ratios = [times["kept"] / times["torch.distributed.run"] for times in (first, medians)]
    print(
        f"  kept beyond collecting: {beyond:.2f} s; of torch.distributed.run: "
        f"{ratios[0]:.2f} to the first collective, {ratios[1]:.2f} in all"
    )


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

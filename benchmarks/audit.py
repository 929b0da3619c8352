"""What `--audit` costs a test: `python benchmarks/audit.py`.

Tests that do nothing run on a gang of two ranks of the CPU, which have loaded torch and
megatron-core, with the audit and without it, in turns. The figure is the difference of the
medians, a test. What a look takes by itself, in one process, is printed as well.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NUM_TESTS = 400
SUITE = """
import time
import megatron.core.models.gpt.gpt_model
import pytest
import torch

TIMES = []

@pytest.mark.parametrize("i", range({num}))
def test_nothing(i, process_group, rank):
    TIMES.append(time.perf_counter())
    if i == {num} - 1 and rank == 0:
        steps = sorted(b - a for a, b in zip(TIMES, TIMES[1:]))
        print("median", steps[len(steps) // 2])
        assert not "shown"
"""


def time_per_test(directory: Path, audit: str) -> float:
    """Return the median time from one test to the next, in seconds."""
    command = ["-m", "pytest", "-p", "megatron", "--ranks=2", "--device=cpu", f"--audit={audit}"]
    done = subprocess.run(
        [sys.executable, *command, "-q", "-W", "ignore", "-p", "no:cacheprovider", "test_it.py"],
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
    )
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("median ")]
    return float(line.split()[1])


def time_of_a_look(num_looks: int = 500) -> float:
    """Return the median time of a look that finds nothing, in seconds."""
    from torch._C._distributed_c10d import HashStore  # noqa: PLC0415
    from torch.distributed import init_process_group  # noqa: PLC0415

    from pytest_megatron.gangs.rank.audit import LeakAudit  # noqa: PLC0415
    from pytest_megatron.gangs.rank.logs import RankLogs  # noqa: PLC0415
    from pytest_megatron.gangs.rank.process_state import StateKeeper  # noqa: PLC0415

    init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    keeper = StateKeeper(1, RankLogs(Path("not-written")), lambda: None, LeakAudit())
    keeper.find_leaks()
    times = []
    for _ in range(num_looks):
        start = time.perf_counter()
        found = keeper.find_leaks()
        times.append(time.perf_counter() - start)
        assert not found
    return statistics.median(times)


def main() -> None:
    """Measure, and print figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found: dict[str, list[float]] = {"off": [], "report": []}
    with tempfile.TemporaryDirectory() as name:
        Path(name, "test_it.py").write_text(SUITE.format(num=NUM_TESTS))
        for number in range(arguments.rounds):
            for audit in ("off", "report") if number % 2 else ("report", "off"):
                found[audit].append(time_per_test(Path(name), audit))
    off, report = (statistics.median(found[audit]) for audit in ("off", "report"))
    look = time_of_a_look()
    print(f"a test without the audit: {off * 1e3:.2f} ms")
    print(f"a test with it:           {report * 1e3:.2f} ms, {(report - off) * 1e3:.2f} ms more")
    print(f"a look by itself:         {look * 1e3:.2f} ms, on {os.cpu_count()} cores")
    if arguments.json:
        arguments.json.write_text(json.dumps({"off": off, "report": report, "look": look}))


if __name__ == "__main__":
    main()

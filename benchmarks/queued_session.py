"""What a whole pytest costs with 10,000 workloads in a queue: `benchmarks/queued_session.py`.

Its engine ends every job as soon as it is asked after (`simulated/instant.py`), so that what is
left is ours: collecting, planning, judging, reporting, `run.json`, history and pages.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from simulated.workloads import draw, write_project


def main() -> None:
    """Run one session and print what it took."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workloads", type=int, default=10_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        write_project(root, draw(arguments.workloads, seed=1))
        metadata = root / "site" / "instant-1.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: instant\nVersion: 1\n")
        (metadata / "entry_points.txt").write_text(
            "[pytest_megatron.engines]\ninstant = simulated.instant:InstantEngine\n"
        )
        path = os.pathsep.join((str(metadata.parent), str(Path(__file__).parent)))
        before = time.monotonic()
        done = subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "-q", "-p", "megatron", "recipes"),
                *("--executor", "instant", "-p", "no:cacheprovider", "--run-dir", "run"),
            ],
            cwd=root,
            env={k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
            | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        took_s = time.monotonic() - before
        size_mb = (root / "run" / "run.json").stat().st_size / 2**20
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = used.ru_utime + used.ru_stime
    print(done.stdout.strip().splitlines()[-1])
    print(f"{took_s:.0f} s, {cpu_s:.0f} s of CPU: {cpu_s / arguments.workloads * 1e3:.1f} ms each")
    print(f"{used.ru_maxrss / 1024:.0f} MB at the most, run.json {size_mb:.1f} MB")


if __name__ == "__main__":
    main()

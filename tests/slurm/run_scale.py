"""Runs 200 jobs on a real Slurm while nodes, slurmctld and pytest itself are killed.

    python tests/slurm/run_scale.py --jobs 200

Nothing may be lost and nothing may run twice unnoticed: see `slurm_scale.py`. Needs the packages of
`tests/labs/slurm_lab.sh install`. Exits with 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

_TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(_TESTS / "labs")]

from labs import slurm  # noqa: E402 - found by the line above
from slurm_scale import ScaleRun, kinds_of  # noqa: E402


def main() -> int:
    """Run it, and print what happened and what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--sleep", type=float, default=2.0, help="seconds of each training")
    parser.add_argument("--keep", action="store_true", help="keep the run directory")
    asked = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="scale-"))
    started = time.monotonic()
    with slurm() as lab:
        run = ScaleRun(root=root, lab=lab, kinds=kinds_of(asked.jobs), sleep_s=asked.sleep)
        run.write()
        try:
            exit_code = carry_out(run, asked.jobs)
        finally:
            run.end()
    took_s = time.monotonic() - started
    log = (root / "pytest.log").read_text()
    problems = run.problems()
    print(*run.happened, sep="\n")
    attempts = Counter(key.rpartition("_")[2] for key, _ in run.marks)
    told = ", ".join(f"{number} of attempt {n}" for n, number in sorted(attempts.items()))
    print(f"{asked.jobs} workloads, {run.num_marks} executions ({told}), {took_s:.0f} s")
    print(f"pytest: exit code {exit_code}; {log.splitlines()[-1].strip('= ')}")
    print(f"{len(problems)} problems")
    print(*problems[:20], sep="\n")
    if asked.keep or problems:
        print(f"kept: {root}")
    else:
        shutil.rmtree(root)
    return 1 if problems or exit_code != 1 else 0


def carry_out(run: ScaleRun, num_jobs: int) -> int:
    """Have everything happen to a run; return the exit code of its last pytest."""
    run.start()
    run.do_at(num_jobs // 10, "node 2 was killed", lambda: run.lab.kill_node(2))
    run.do_at(num_jobs * 3 // 10, "slurmctld was killed", run.lab.kill_controller)
    time.sleep(3)
    run.lab.start_controller()
    run.do_at(num_jobs * 4 // 10, "node 2 came back", lambda: run.lab.start_node(2))
    run.do_at(num_jobs // 2, "pytest was killed", run.kill_pytest)
    run.start(f"--attach={run.root}/run")
    run.do_at(num_jobs * 7 // 10, "node 3 was killed", lambda: run.lab.kill_node(3))
    run.do_at(num_jobs * 8 // 10, "node 3 came back", lambda: run.lab.start_node(3))
    return run.wait()


if __name__ == "__main__":
    sys.exit(main())

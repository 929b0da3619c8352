"""How well a run of 10,000 workloads fills 1,000 GPUs: `python benchmarks/simulated_cluster.py`.

The controller is the real one, down to the words of sbatch: the scheduler, the trainings with their
plans, triage and retries, the comparison with goldens, the Slurm engine with its journal and files.
The cluster below it is made up (`simulated/cluster.py`), and so is its clock. Nodes fail, jobs are
preempted, trainings fail for a cause that is not theirs, and some losses are wrong.

No schedule of the same jobs can end before their GPU time over the number of GPUs, nor before the
longest chain of attempts of one workload; the figure is the makespan over that bound.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from simulated.scheduler import Found, Simulation, Trouble
from simulated.workloads import Simulated, draw

from pytest_megatron.workloads.verdict.scheduler import DEFAULT_MOST_SUBMISSIONS

GPUS_PER_NODE = 8


def wrong_verdicts(works: list[Simulated], found: Found) -> dict[str, tuple[str, str | None]]:
    """Return the workloads that came to something else than they had to: expected and found."""
    wrong = {}
    for work in works:
        expected, verdict = work.verdict, found.verdicts.get(work.name)
        if work.name in found.hit and expected == "passed":
            expected = "flaky"
        if verdict != expected:
            wrong[work.name] = (expected, verdict)
    return wrong


def main() -> int:
    """Run one simulation and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workloads", type=int, default=10_000)
    parser.add_argument("--nodes", type=int, default=125, help="of 8 GPUs each")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--most-submissions", type=int, default=DEFAULT_MOST_SUBMISSIONS)
    arguments = parser.parse_args()
    works, num_gpus = draw(arguments.workloads, arguments.seed), arguments.nodes * GPUS_PER_NODE
    with tempfile.TemporaryDirectory() as name:
        simulation = Simulation(
            Path(name), works, num_nodes=arguments.nodes, seed=arguments.seed, trouble=Trouble()
        )
        before = time.process_time()
        found = simulation.run(arguments.most_submissions)
    cpu_s = time.process_time() - before
    memory_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    bound_s = found.bound_s(num_gpus)
    wrong = wrong_verdicts(works, found)
    twice = [key for key, number in found.executions.items() if number > 1]
    ends = ", ".join(f"{number} {state}" for state, number in found.ends.most_common())
    verdicts = Counter(found.verdicts.values())
    told = ", ".join(f"{number} {verdict}" for verdict, number in verdicts.most_common())
    print(f"{arguments.workloads:,} workloads on {num_gpus:,} GPUs, seed {arguments.seed}")
    print(f"makespan    {found.makespan_s / 3600:.2f} h, bound {bound_s / 3600:.2f} h: ", end="")
    print(f"{found.makespan_s / bound_s:.3f} x (longest chain {found.chain_s / 3600:.2f} h)")
    print(f"jobs        {found.num_submissions:,}; {ends}")
    print(f"queries     {found.num_queries:,} in {found.num_intervals:,} intervals: ", end="")
    print(f"{found.num_queries / found.num_intervals:.2f} each")
    print(f"verdicts    {told}; {len(wrong)} wrong, {len(twice)} orders executed twice")
    print(f"controller  {memory_mb:.0f} MB at the most, {cpu_s:.0f} s of CPU, ", end="")
    print(f"{cpu_s / len(found.executions) * 1000:.1f} ms for each attempt")
    for name, (expected, verdict) in sorted(wrong.items())[:5]:
        print(f"wrong: {name}: expected {expected}, found {verdict}")
    return 1 if wrong or twice else 0


if __name__ == "__main__":
    sys.exit(main())

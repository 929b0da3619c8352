"""What distributed tests cost on gangs, beside other ways to run them, in turns.

    python benchmarks/gangs.py                          everything on the CPU, about 20 minutes
    python benchmarks/gangs.py --worlds 2 --rounds 1    a quick look
    python benchmarks/gangs.py --device cuda --worlds 8 --only cold

Every figure is the median of rounds in which all runners take turns; look at the ratios. A round
waits until the machine is quiet.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

SUITES = Path(__file__).parent / "gang_suites"
FEW, MANY = 40, 1240
QUIET_CORES = 0.2
LONGEST_WAIT_S = 60.0
COLLECTED = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Runner:
    """One way to run a suite.

    Attributes:
        command: From world size to the words after the interpreter, without the suite.
        is_slow: Whether it starts processes for each test, so that few tests must do.
        needs: Module and program that it cannot run without.
        launcher: From world size to the words before the interpreter.
    """

    name: str
    suite: str
    command: Callable[[int], list[str]]
    is_slow: bool = False
    env: tuple[tuple[str, str], ...] = ()
    needs: tuple[str, ...] = ()
    launcher: Callable[[int], list[str]] = lambda _: []

    @property
    def lacks(self) -> list[str]:
        """What of `needs` is not installed."""
        return [
            name
            for name in self.needs
            if importlib.util.find_spec(name) is None and find_program(name) is None
        ]


def find_program(name: str) -> str | None:
    """Return where a program is, one beside this interpreter before others."""
    beside = str(Path(sys.executable).parent)
    return shutil.which(name, path=os.pathsep.join([beside, os.environ.get("PATH", "")]))


def mpiexec(world_size: int) -> list[str]:
    """Return how MPI starts every rank."""
    return [find_program("mpiexec") or "mpiexec", "-n", str(world_size)]


def pytest_words(*words: str) -> list[str]:
    """Return how pytest is called: without a rival that starts MPI in every session."""
    return ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:mpi-pytest", *words]


def torchrun(world_size: int) -> list[str]:
    """Return how pytest is called under torch.distributed.run."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
    return [*launch, *pytest_words("-p", "no:megatron")]


def gang(device: str) -> Callable[[int], list[str]]:
    """Return how pytest is called with gangs."""
    return lambda n: pytest_words("-p", "megatron", f"--ranks={n}", f"--device={device}")


def with_mpi(world_size: int) -> list[str]:
    """Return how each of the ranks that MPI started calls pytest."""
    return [*alone(world_size), "-p", "mpi-pytest"]


def alone(_: int) -> list[str]:
    """Return how pytest is called without us."""
    return pytest_words("-p", "no:megatron")


def all_runners(device: str) -> list[Runner]:
    """Return every way to run the suite on a device, also those that lack something."""
    spawn, fork = (("BENCH_METHOD", "spawn"),), (("BENCH_METHOD", "fork"),)
    every = [
        Runner(name="pytest alone", suite="plain", command=alone),
        Runner(name="gang", suite="gang", command=gang(device)),
        Runner(name="torchrun + pytest", suite="torchrun", command=torchrun),
        Runner(name="gang, torchrun's suite", suite="torchrun", command=gang(device)),
        Runner(
            name="MultiProcContinuousTest", suite="continuous", command=alone, needs=("expecttest",)
        ),
        Runner(
            name="mpi-pytest, SPMD",
            suite="mpi",
            command=with_mpi,
            needs=("pytest_mpi", "mpi4py", "mpiexec"),
            launcher=mpiexec,
        ),
        Runner(name="gang, isolated", suite="isolated", command=gang(device)),
        Runner(name="mp fork per test", suite="fork", command=alone, env=fork),
        Runner(name="mp spawn per test", suite="fork", command=alone, is_slow=True, env=spawn),
    ]
    return every[1:4] if device == "cuda" else every


def runners(device: str) -> dict[str, Runner]:
    """Return every way to run the suite on a device."""
    every = all_runners(device)
    return {runner.name: runner for runner in every if not runner.lacks}


def tell_lacking(device: str) -> None:
    """Say which rivals are left out, and why."""
    for runner in all_runners(device):
        if runner.lacks:
            lacking = ", ".join(runner.lacks)
            print(f"left out: {runner.name}, for lack of {lacking}; see benchmarks/rivals.txt")


def busy_cores() -> float:
    """Return the processor time of all processes since boot, in seconds."""
    words = Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0].split()[1:9]
    ticks = [int(word) for word in words]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def wait_until_quiet() -> None:
    """Wait until others leave the processor alone, but not for ever."""
    until = time.monotonic() + LONGEST_WAIT_S
    while time.monotonic() < until:
        before = busy_cores()
        time.sleep(0.5)
        if (busy_cores() - before) / 0.5 < QUIET_CORES:
            return


def environment(**more: str) -> dict[str, str]:
    """Return the variables of a session."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **more}
    variables.pop("PYTHONDONTWRITEBYTECODE", None)  # else all but installed packages is compiled
    return variables


def seconds(runner: Runner, world_size: int, num_tests: int, device: str, **env: str) -> float:
    """Return how long one session takes, from start to end, as a user sees it."""
    wait_until_quiet()
    variables = environment(
        BENCH_TESTS=str(num_tests),
        BENCH_WORLD=str(world_size),
        BENCH_DEVICE=device,
        **dict(runner.env),
        **env,
    )
    with tempfile.TemporaryDirectory() as directory:
        for path in SUITES.glob("*.py"):
            (Path(directory) / path.name).write_text(path.read_text(encoding="utf-8"))
        words = [*runner.launcher(world_size), sys.executable, *runner.command(world_size)]
        command = [*words, f"suite_{runner.suite}.py"]
        started = time.perf_counter()
        done = subprocess.run(
            command, cwd=directory, env=variables, capture_output=True, text=True, check=False
        )
        taken = time.perf_counter() - started
    is_crashing = runner.suite == "crash"
    if f"{num_tests} passed" not in done.stdout and not is_crashing:
        raise SystemExit(f"{runner.name}: {done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return taken


def measure(
    names: Sequence[str], world_size: int, num_tests: int, rounds: int, device: str
) -> dict[str, float]:
    """Return the median seconds of each runner; they take turns."""
    found = runners(device)
    taken: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            taken[name].append(seconds(found[name], world_size, num_tests, device))
    return {name: statistics.median(values) for name, values in taken.items()}


def show(title: str, rows: dict[str, float], unit: str, base: str) -> None:
    """Print a table with the ratio to one of its rows."""
    print(f"\n{title}")
    for name, value in rows.items():
        print(f"  {name:26} {value:9.2f} {unit}   {value / rows[base]:5.2f} x {base}")


def compare_sessions(world_size: int, rounds: int, device: str, results: list[object]) -> None:
    """Measure cold sessions, then what one more test costs."""
    names = [name for name, r in runners(device).items() if not r.is_slow and "isol" not in name]
    names = [name for name in names if name != "mp fork per test"]
    base = "pytest alone" if device == "cpu" else "torchrun + pytest"
    cold = measure(names, world_size, FEW, rounds, device)
    show(f"{FEW} tests from cold, world {world_size}, {device}", cold, "s ", base)
    many = measure(names, world_size, MANY, rounds, device)
    marginal = {name: (many[name] - cold[name]) / (MANY - FEW) * 1000 for name in names}
    show(f"one more test, world {world_size}, {device}", marginal, "ms", "torchrun + pytest")
    results.append({"world": world_size, "cold_s": cold, "marginal_ms": marginal})


def compare_isolated(world_size: int, rounds: int, results: list[object]) -> None:
    """Measure tests that get processes of their own."""
    names = ["gang, isolated", "mp fork per test"]
    few = measure(names, world_size, 10, rounds, "cpu")
    more = measure(names, world_size, FEW, rounds, "cpu")
    each = {name: (more[name] - few[name]) / (FEW - 10) * 1000 for name in names}
    slow = "mp spawn per test"
    pair = [measure([slow], world_size, n, 1, "cpu")[slow] for n in (1, 3)]
    each[slow] = (pair[1] - pair[0]) / 2 * 1000
    show(f"one test in fresh processes, world {world_size}", each, "ms", "gang, isolated")
    results.append({"world": world_size, "isolated_ms": each})


def compare_collection(world_size: int, rounds: int, results: list[object]) -> None:
    """Measure the collection of many items, none of which runs but one."""
    rows: dict[str, list[float]] = {"pytest alone": [], "gang": [], "torchrun + pytest": []}
    commands = {"pytest alone": alone, "gang": gang("cpu"), "torchrun + pytest": torchrun}
    for _ in range(rounds):
        for name, command in commands.items():
            wait_until_quiet()
            with tempfile.TemporaryDirectory() as directory:
                (Path(directory) / "test_many.py").write_text(
                    "import pytest\n"
                    f"@pytest.mark.parametrize('number', range({COLLECTED}))\n"
                    "def test_it(number):\n    pass\n"
                )
                words = [*command(world_size), "-k", "test_it and 1999"]
                started = time.perf_counter()
                subprocess.run(
                    [sys.executable, *words],
                    cwd=directory,
                    check=True,
                    stdout=subprocess.DEVNULL,
                    env=environment(),
                )
                rows[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(values) for name, values in rows.items()}
    show(f"collect {COLLECTED} items, run one, world {world_size}", medians, "s ", "pytest alone")
    results.append({"world": world_size, "collection_s": medians})


def measure_recovery(world_size: int, results: list[object]) -> None:
    """Measure from the death of a rank to the start of the next test on a new gang."""
    runner = Runner(name="gang, crashing", suite="crash", command=gang("cpu"))
    with tempfile.NamedTemporaryFile("r") as trace:
        seconds(runner, world_size, 20, "cpu", BENCH_TRACE=trace.name)
        rows = [line.split() for line in trace.read().splitlines()]
    died = {int(row[0]): float(row[2]) for row in rows if row[1] == "dies"}
    began = {
        number: max(float(row[2]) for row in rows if row[0] == str(number) and row[1] != "dies")
        for number in {int(row[0]) for row in rows}
    }
    taken = [began[n + 1] - at for n, at in died.items() if n + 1 in began]
    print(f"\nfrom a rank's death to the next test, world {world_size}")
    print(f"  median {statistics.median(taken) * 1000:.0f} ms, worst {max(taken) * 1000:.0f} ms")
    results.append({"world": world_size, "recovery_ms": statistics.median(taken) * 1000})


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", default="2,4")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--only", default="cold,isolated,collection,recovery")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    parts = asked.only.split(",")
    tell_lacking(asked.device)
    results: list[object] = []
    for world_size in map(int, asked.worlds.split(",")):
        if "cold" in parts:
            compare_sessions(world_size, asked.rounds, asked.device, results)
        if asked.device == "cpu" and "isolated" in parts:
            compare_isolated(world_size, asked.rounds, results)
        if asked.device == "cpu" and "collection" in parts:
            compare_collection(world_size, asked.rounds, results)
        if asked.device == "cpu" and "recovery" in parts:
            measure_recovery(world_size, results)
    if asked.json is not None:
        asked.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()

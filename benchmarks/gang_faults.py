"""What becomes of a fault on one rank under gangs and under other ways to run the same ten tests.

    python benchmarks/gang_faults.py                                    everything, about 20 minutes
    python benchmarks/gang_faults.py --runner gang --faults exit1_before,skip_after

The last rank does something wrong in the fifth test, before or after its collective. Right is a
runner that names this test as failed, and no other, runs all others on every rank, and exits with
an error. Every time limit is 10 s; a runner that has not ended after `--cap` seconds hangs.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import gangs

NUM_TESTS, STRUCK = 10, 4
FAULTS = (
    *("assert_before", "assert_after", "skip_before", "skip_after"),
    *("exit1_before", "exit1_after", "exit0_after", "sysexit0_after"),
    *("segv_before", "segv_after", "sigkill_after"),
    *("sleep_before", "missed_before", "extra_after"),
)
OURS = ("--rank-timeout=10", "-omegatron_rank_grace=2")
_NAMED = re.compile(r"^(?:FAILED|ERROR) \S+?test_reduce[\[_](\d+)", re.MULTILINE)


def try_fault(runner: gangs.Runner, fault: str, world_size: int, cap_s: float) -> str:
    """Return what became of a fault: `right`, or what was not.

    `n` the guilty test is named as failed, `a` all others ran to their end on every rank, `w`
    others are named as well; `PASSES` the session is green, `HANGS` it does not end.
    """
    with tempfile.TemporaryDirectory() as directory:
        for path in gangs.SUITES.glob("*.py"):
            (Path(directory) / path.name).write_text(path.read_text(encoding="utf-8"))
        words = [*runner.launcher(world_size), sys.executable, *runner.command(world_size)]
        if "megatron" in words:
            words += OURS
        output = Path(directory, "output.txt")
        ends = Path(directory, "ends.txt")
        ends.touch()
        with output.open("wb") as file:
            process = subprocess.Popen(
                [*words, "-rfE", f"suite_{runner.suite}.py"],
                cwd=directory,
                env={
                    **os.environ,
                    "BENCH_TESTS": str(NUM_TESTS),
                    "BENCH_WORLD": str(world_size),
                    "BENCH_FAULT": fault,
                    "BENCH_ENDS": str(ends),
                    "OMP_NUM_THREADS": "1",
                    **dict(runner.env),
                },
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                exit_code = process.wait(cap_s)
            except subprocess.TimeoutExpired:
                return "HANGS"
            finally:
                _kill_session(process)
        named = {int(number) for number in _NAMED.findall(output.read_text(errors="replace"))}
        ended = {tuple(map(int, line.split())) for line in ends.read_text().splitlines()}
    return judge(exit_code, named, ended, world_size)


def judge(exit_code: int, named: set[int], ended: set[tuple[int, ...]], world_size: int) -> str:
    """Return the words for what a session did."""
    others = [(n, r) for n in range(NUM_TESTS) if n != STRUCK for r in range(world_size)]
    if exit_code == 0:
        return "PASSES"
    found = ("n" if STRUCK in named else "-") + ("a" if ended.issuperset(others) else "-")
    found += "w" if named - {STRUCK} else ""
    return "right" if found == "na" else found


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    """Kill what a runner left in its session; ranks of some have sessions of their own."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def main() -> None:
    """Run what was asked for, and print a table."""

    def words(text: str) -> list[str]:
        return [word for word in text.split(",") if word]

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    option = parser.add_argument
    option(
        "--runner", action="append", help="a name, repeatable; by default all that are installed"
    )
    option("--faults", type=words, default=list(FAULTS), help="names; by default all")
    option("--world", type=int, default=2, help="world size")
    option("--cap", type=float, default=60.0, help="seconds for one session")
    asked = parser.parse_args()
    gangs.tell_lacking("cpu")
    known = {n: r for n, r in gangs.runners("cpu").items() if n != "pytest alone" and not r.is_slow}
    for name in asked.runner or known:
        if name not in known:
            raise SystemExit(f"--runner: unknown {name}, expected of {sorted(known)}")
    for name in asked.faults:
        if name not in FAULTS:
            raise SystemExit(f"--faults: unknown {name}, expected of {', '.join(FAULTS)}")
    for name in asked.runner or known:
        found = {f: try_fault(known[name], f, asked.world, asked.cap) for f in asked.faults}
        num_right = sum(text == "right" for text in found.values())
        print(f"{name}: {num_right}/{len(found)} right", flush=True)
        for fault, text in found.items():
            print(f"  {fault:16} {text}", flush=True)


if __name__ == "__main__":
    main()

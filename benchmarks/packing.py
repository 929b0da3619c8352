"""How well tests of mixed sizes fill 8 ranks: `python benchmarks/packing.py`.

Tests that only sleep ask for gangs of 1, 2 and 4 ranks. No schedule can end before the sum of
`ranks * seconds` over 8, nor before the longest test; the figure is the time from the first test to
the last, over that bound. Sleeping needs no cores, so that the figure holds on any machine as far
as starting ranks is quick; how long that took is printed as well.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path

SLOTS = 8
SIZES = (1, 2, 4)
SUITE = """
import json
import os
import time

import pytest

TESTS = json.load(open({path!r}))


@pytest.mark.parametrize("size, seconds, n", TESTS["{name}"])
def test_sleeps(size, seconds, n, request):
    start = time.time()
    time.sleep(seconds)
    line = json.dumps([os.environ["RANK"], size, seconds, start, time.time()])
    with open({log!r}, "a") as file:
        file.write(line + "\\n")


"""
CONFTEST = """
import pytest


def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker(pytest.mark.world_size(item.callspec.params["size"]))
"""


def durations(kind: str, num_tests: int, seed: int) -> list[tuple[int, float]]:
    """Return world size and seconds of each test."""
    chance = random.Random(seed)
    choose: dict[str, Callable[[], float]] = {
        "equal": lambda: 0.3,
        "random": lambda: chance.uniform(0.05, 0.6),
        "few long": lambda: chance.choice((0.1, 0.1, 0.1, 1.0)),
    }
    return [(chance.choice(SIZES), choose[kind]()) for _ in range(num_tests)]


def measure(kind: str, num_tests: int, seed: int) -> tuple[float, float, float]:
    """Return the bound, the time from the first test to the last, and that of the session."""
    tests = durations(kind, num_tests, seed)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        log = root / "log"
        files: dict[str, list[tuple[int, float, int]]] = {}
        for number, (size, seconds) in enumerate(tests):
            files.setdefault(f"test_{number // 10}", []).append((size, seconds, number))
        (root / "tests.json").write_text(json.dumps(files))
        (root / "conftest.py").write_text(textwrap.dedent(CONFTEST))
        for file in files:
            text = SUITE.format(path=str(root / "tests.json"), log=str(log), name=file)
            (root / f"{file}.py").write_text(text)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "megatron", f"--ranks={SLOTS}"]
        done = subprocess.run(
            [*command, "--device=cpu", "-p", "no:cacheprovider", "--run-dir", str(root / "run")],
            cwd=root,
            env={k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise SystemExit(done.stdout + done.stderr)
        lines = [json.loads(line) for line in log.read_text().splitlines()]
    bound = max(sum(size * seconds for size, seconds in tests) / SLOTS, *(s for _, s in tests))
    first, last = min(line[3] for line in lines), max(line[4] for line in lines)
    return bound, last - first, float(done.stdout.rpartition(" in ")[2].partition("s")[0])


def main() -> None:
    """Print a line for each kind of durations."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tests", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    print(f"{arguments.tests} tests of 1, 2 and 4 ranks on {SLOTS}, median of {arguments.rounds}")
    for kind in ("equal", "random", "few long"):
        rounds = sorted(
            (measured / bound, bound, measured, session)
            for bound, measured, session in (
                measure(kind, arguments.tests, seed) for seed in range(arguments.rounds)
            )
        )
        ratio, bound, measured, session = rounds[len(rounds) // 2]
        print(
            f"{kind:<9} {ratio:.2f} of the best possible: {measured:.2f} s, bound {bound:.2f} s, "
            f"whole session {session:.2f} s"
        )


if __name__ == "__main__":
    main()

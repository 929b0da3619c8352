"""What the plugin costs a pytest session: `python benchmarks/start.py`.

Two questions, each answered by a ratio of runs that take turns in one invocation: what a session
without any of our files pays for having the plugin installed, and what collecting 10,000 recipe
rows costs beside 10,000 parametrised test functions.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from expand import NUM_ROWS, write_recipes

ROUNDS = 5
# As users have it: modules are compiled, and pytest has its cache, from an earlier session.
ENV = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
TESTS = f"""\
import pytest

@pytest.mark.parametrize("number", range({NUM_ROWS}))
def test_nothing(number):
    pass
"""


def seconds(directory: Path, *arguments: str) -> float:
    """Return how long one pytest takes, from start to end, as a user sees it."""
    command = [sys.executable, "-m", "pytest", "-q", *arguments]
    started = time.perf_counter()
    subprocess.run(command, cwd=directory, check=True, stdout=subprocess.DEVNULL, env=ENV)
    return time.perf_counter() - started


def compare(title: str, directory: Path, ours: list[str], theirs: list[str]) -> None:
    """Print the medians of two ways to call pytest, taking turns, and their ratio."""
    first = seconds(directory, *ours)
    seconds(directory, *theirs)
    pairs = [(seconds(directory, *ours), seconds(directory, *theirs)) for _ in range(ROUNDS)]
    mine = statistics.median(pair[0] for pair in pairs)
    other = statistics.median(pair[1] for pair in pairs)
    print(f"{title}: {mine:.3f} s against {other:.3f} s, ratio {mine / other:.2f}", end="")
    print(f"; the first time {first:.3f} s")


def main() -> None:
    """Run both comparisons."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "test_one.py").write_text("def test_one():\n    pass\n")
        plain = ["test_one.py"]
        compare("one test, plugin or not", directory, plain, [*plain, "-p", "no:megatron"])
        (directory / "test_many.py").write_text(TESTS)
        (directory / "recipes").mkdir()
        write_recipes(directory / "recipes", 1)
        compare(
            f"collect {NUM_ROWS} rows or tests",
            directory,
            ["-p", "megatron", "--collect-only", "recipes"],
            ["--collect-only", "test_many.py"],
        )


if __name__ == "__main__":
    main()

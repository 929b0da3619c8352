"""What the commands of this checkout take beside those of another revision, in turns.

    python benchmarks/against.py v0.1.0                 9 figures, 5 rounds; some 20 minutes
    python benchmarks/against.py HEAD~20 --rounds 3 --only "cold,one more test"

The other revision is cloned, with an environment of its own. A figure is the median of the ratios
of the rounds; it fails if it is over the limit, 1.15. Only what users type is called, so that both
revisions understand it.
"""

from __future__ import annotations

import argparse
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

from expand import write_recipes
from gangs import SUITES, wait_until_quiet
from golden_tree import write_tree
from triage import write_logs

ROOT = Path(__file__).parents[1]
LIMIT = 1.15
FEW, MANY = 40, 1240
PYTEST = ("python", "-m", "pytest", "-q", "-p", "no:cacheprovider")
GANG = (*PYTEST, "-p", "megatron", "--ranks=2", "--device=cpu")
COMMAND = ("pytest-megatron",)
MANY_TESTS = """
import pytest

@pytest.mark.parametrize("number", range(2000))
def test_it(number):
    pass
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """A command that is timed.

    Attributes:
        words: A program of the environment, and its arguments.
        prepare: Writes files into the directory that it runs in.
        less: Words that replace `words` in a second run, whose time is subtracted.
    """

    words: Sequence[str]
    prepare: Callable[[Path], object]
    env: tuple[tuple[str, str], ...] = ()
    less: tuple[tuple[str, str], ...] = ()


def write_suites(directory: Path) -> None:
    """Write the suites of `gangs.py`."""
    for path in SUITES.glob("*.py"):
        (directory / path.name).write_text(path.read_text(encoding="utf-8"))


def write_rows(directory: Path) -> None:
    """Write 10,000 rows of recipes."""
    (directory / "recipes").mkdir()
    write_recipes(directory / "recipes", 1)


def copy_recipes(directory: Path) -> None:
    """Copy the project's recipes, with their cases and goldens."""
    for name in ("recipes", "golden_values", "tests/functional_tests"):
        (directory / name).parent.mkdir(exist_ok=True)
        shutil.copytree(ROOT / name, directory / name)


def write_test(text: str) -> Callable[[Path], object]:
    """Return what writes a file of tests."""
    return lambda directory: (directory / "test_it.py").write_text(text)


def suite_of(num_tests: int) -> tuple[tuple[str, str], ...]:
    """Return the variables of a suite of so many tests."""
    return ("BENCH_TESTS", str(num_tests)), ("BENCH_WORLD", "2"), ("BENCH_DEVICE", "cpu")


ONE = "def test_one():\n    pass\n"
COLD = (*GANG, "suite_gang.py")
FIGURES = {
    "start without asking": Figure(words=(*PYTEST, "test_it.py"), prepare=write_test(ONE)),
    "cold": Figure(words=COLD, prepare=write_suites, env=suite_of(FEW)),
    "one more test": Figure(
        words=COLD, prepare=write_suites, env=suite_of(MANY), less=suite_of(FEW)
    ),
    "isolated": Figure(words=(*GANG, "suite_isolated.py"), prepare=write_suites, env=suite_of(FEW)),
    "collect tests": Figure(
        words=(*GANG, "-k", "test_it and 1999"), prepare=write_test(MANY_TESTS)
    ),
    "collect rows": Figure(
        words=(*PYTEST, "-p", "megatron", "--collect-only", "recipes"), prepare=write_rows
    ),
    "workload on the CPU": Figure(
        words=(*PYTEST, "-p", "megatron", "recipes/gpt.yaml", "-k", "tp1_pp1"),
        prepare=copy_recipes,
    ),
    "golden lint": Figure(words=(*COMMAND, "golden", "lint", "."), prepare=write_tree),
    "triage": Figure(
        words=(*COMMAND, "triage", "."), prepare=lambda place: write_logs(place, 4, 50_000_000)
    ),
}


def seconds(figure: Figure, programs: Path, env: tuple[tuple[str, str], ...]) -> float:
    """Return how long the command of a figure takes, from start to end, as a user sees it."""
    with tempfile.TemporaryDirectory() as name:
        figure.prepare(Path(name))
        variables = {**os.environ, "OMP_NUM_THREADS": "1", **dict(env)}
        variables.pop("PYTHONDONTWRITEBYTECODE", None)
        run = [str(programs / figure.words[0]), *figure.words[1:]]
        wait_until_quiet()
        started = time.perf_counter()
        done = subprocess.run(run, cwd=name, env=variables, capture_output=True, check=False)
        taken = time.perf_counter() - started
    if done.returncode not in (0, 1):
        raise SystemExit(f"{run}: exit {done.returncode}\n{done.stdout.decode()[-2000:]}")
    return taken


def measure(figure: Figure, programs: Path) -> float:
    """Return the seconds of a figure with the programs of an environment."""
    taken = seconds(figure, programs, figure.env)
    return taken - seconds(figure, programs, figure.less) if figure.less else taken


def make_environment(revision: str, directory: Path) -> Path:
    """Clone another revision, and return the programs of its environment."""
    git = shutil.which("git") or "git"
    subprocess.run([git, "clone", "-q", ROOT, directory], check=True)
    subprocess.run([git, "checkout", "-q", revision], cwd=directory, check=True)
    subprocess.run([sys.executable, "dev.py", "setup"], cwd=directory, check=True)
    return directory / ".venv/bin"


def main() -> None:
    """Measure, print a line for each figure, and fail if one is over the limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("revision")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default=",".join(FIGURES))
    asked = parser.parse_args()
    slower = []
    with tempfile.TemporaryDirectory() as name:
        theirs = make_environment(asked.revision, Path(name, "other"))
        for title in asked.only.split(","):
            figure = FIGURES[title]
            pairs = [
                (measure(figure, Path(sys.executable).parent), measure(figure, theirs))
                for _ in range(asked.rounds)
            ]
            ratio = statistics.median(mine / other for mine, other in pairs)
            mine, other = (statistics.median(pair[i] for pair in pairs) for i in (0, 1))
            print(f"{title:22} {mine:7.3f} s against {other:7.3f} s, {ratio:.2f} x", flush=True)
            if ratio > LIMIT:
                slower.append(title)
    if slower:
        raise SystemExit(f"more than {LIMIT:g} times as long: {', '.join(slower)}")


if __name__ == "__main__":
    main()

"""What goldens cost: `python benchmarks/goldens.py [lint|history]`.

`lint` reads a tree like Megatron-LM's with `golden lint`, beside a program that only parses its
JSON. `history` refreshes the goldens of a small project ten times, written by this package and with
a line for each step, as Megatron-LM writes them, and counts the lines that git shows as changed and
the bytes that its history takes.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from golden_tree import write_tree

from pytest_megatron.workloads.golden.model import MetricMap, Provenance, is_finite, series_of
from pytest_megatron.workloads.golden.store import golden_text, read_golden

REPEATS = 5
NUM_REFRESHES = 10
GOLDENS = Path(__file__).parents[1] / "golden_values"
FORMS = {"a line a metric": None, "a line a step": 4}
PARSE = """
import json, pathlib, sys
for path in pathlib.Path(sys.argv[1]).rglob("golden_values*.json"):
    text = path.read_text()
    text and json.loads(text)
"""


def measure_lint() -> None:
    """Print how long the whole command takes, and how long the bare parsing."""
    with tempfile.TemporaryDirectory() as name:
        write_tree(Path(name))
        sizes = [path.stat().st_size for path in Path(name).rglob("golden_values*.json")]
        print(f"{len(sizes)} goldens, {sum(sizes) / 1e6:.1f} MB")
        command = Path(sys.executable).with_name("pytest-megatron")
        commands: dict[str, list[str | Path]] = {
            "golden lint": [command, "golden", "lint", "--root", name],
            "lint, recipes and cases alone": [
                *(command, "lint", "--root", name, f"{name}/tests/test_utils/recipes")
            ],
            "json.loads alone": [sys.executable, "-c", PARSE, name],
        }
        seconds: dict[str, list[float]] = {what: [] for what in commands}
        for _ in range(REPEATS):
            for what, words in commands.items():
                start = time.perf_counter()
                subprocess.run(words, check=False, capture_output=True)
                seconds[what].append(time.perf_counter() - start)
        for what, found in seconds.items():
            print(f"{what}: {statistics.median(found):.2f} s, median of {REPEATS}")


def measure_history() -> None:
    """Print lines and bytes of ten refreshes for each form."""
    goldens = [read_golden(path) for path in sorted(GOLDENS.rglob("*.json"))]
    series = [golden for golden in goldens if golden.generation is None]
    for form, indent in FORMS.items():
        with tempfile.TemporaryDirectory() as name:
            root = Path(name)
            _git(root, "init", "-q")
            random.seed(0)
            lines, size = 0, 0
            for number in range(NUM_REFRESHES + 1):
                for index, golden in enumerate(series):
                    metrics = golden.metrics if number == 0 else _noisy(golden.metrics)
                    provenance = golden.provenance or Provenance()
                    path = root / f"{index}.json"
                    made = replace(golden, metrics=metrics, provenance=provenance)
                    path.write_text(golden_text(made))
                    if indent is not None:
                        path.write_text(json.dumps(json.loads(path.read_text()), indent=indent))
                _git(root, "add", ".")
                changed = _git(root, "diff", "--cached", "--numstat").splitlines()
                lines += sum(int(line.split()[0]) for line in changed) if number else 0
                _git(root, "commit", "-qm", f"refresh {number}")
            size = sum(path.stat().st_size for path in root.glob("*.json"))
            _git(root, "gc", "-q", "--aggressive")
            counts = _git(root, "count-objects", "-v")
            pack = next(line.split()[1] for line in counts.splitlines() if "size-pack" in line)
            print(
                f"{form}: {lines} lines added in {NUM_REFRESHES} refreshes of {len(series)} "
                f"goldens, {size / 1000:.0f} kB in the tree, {pack} kB of history"
            )


def _noisy(metrics: MetricMap) -> MetricMap:
    """Return what another container might measure: every value a little off."""
    return {
        name: series_of(
            {s: v * (1 + random.gauss(0, 1e-5)) if is_finite(v) else v for s, v in one.items()},  # type: ignore[operator] # a finite value is a number
            is_full_precision=True,
        )
        for name, one in metrics.items()
    }


def _git(root: Path, *arguments: str) -> str:
    settings = ("-c", "user.name=a", "-c", "user.email=a@b", "-C", str(root))
    command = ["git", *settings, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    parts = sys.argv[1:] or ["lint", "history"]
    for part in parts:
        {"lint": measure_lint, "history": measure_history}[part]()

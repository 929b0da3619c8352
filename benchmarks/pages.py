"""What the pages of a run cost: `python benchmarks/pages.py`.

A run with one workload of 8 metrics is made, golden and one repeat, of 100 and of 10,000 steps. Its
page is made from the files in the run directory, in turns with parsing those files as JSON and
writing the same values as JSON again, which is what a page that embeds everything has to do at
least. Beside it, the pages of a run of 600 workloads.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

from pytest_megatron.base.files import JsonValue
from pytest_megatron.pages.read import RunReader
from pytest_megatron.pages.write import write_in_place
from pytest_megatron.runs.layout import item_dirs
from pytest_megatron.runs.record import to_json
from pytest_megatron.workloads.golden.compare.compare import compare
from pytest_megatron.workloads.golden.compare.result import recorded
from pytest_megatron.workloads.golden.model import (
    Golden,
    MetricMap,
    Provenance,
    Series,
    series_of,
)
from pytest_megatron.workloads.golden.store import golden_text, read_golden, write_metrics

NUM_METRICS = 8
ROUNDS = 7


def noisy(num_steps: int, seed: int, noise: float) -> Series:
    """Return a curve that falls, with noise in every digit: nothing about it packs well."""
    shape, shake = random.Random(seed), random.Random(seed + noise)
    values = {
        step: (10 / (1 + step / 500) + shape.random() + math.sin(step))
        * (1 + noise * (shake.random() - 0.5))
        for step in range(1, num_steps + 1)
    }
    return series_of(dict(values), is_full_precision=True)


def metrics(num_steps: int, noise: float = 0.0) -> MetricMap:
    """Return 8 metrics."""
    return {f"metric {n}": noisy(num_steps, n, noise) for n in range(NUM_METRICS)}


def make_run(root: Path, *, num_items: int, num_steps: int) -> Path:
    """Write a run directory as a session leaves it."""
    golden, measured = metrics(num_steps), metrics(num_steps, 1e-4)
    items: dict[str, JsonValue] = {}
    comparisons: list[JsonValue] = []
    for number in range(num_items):
        node_id = f"recipes/h100/gpt.yaml::gpt3_345m_tp2_pp2_case_{number}[dev-dgx_h100]"
        dirs = item_dirs(root, node_id)
        phase = dirs.attempt(repeat=1, attempt=1).phase(1)
        phase.root.mkdir(parents=True)
        write_metrics(phase.metrics, measured)
        made = Golden(path=str(dirs.golden), metrics=golden, provenance=Provenance(repeats=1))
        dirs.golden.write_text(golden_text(made))
        if not comparisons:  # the same for all of them
            found = compare(read_golden(dirs.golden), measured)
            comparisons += [to_json(recorded(one)) for one in found]
        repeat: JsonValue = {"repeat": 1, "against": "golden", "comparisons": comparisons}
        dirs.comparison.write_text(json.dumps({"schema": 1, "repeats": [repeat]}))
        attempt: JsonValue = {"repeat": 1, "attempt": 1, "duration_s": 60.0}
        summary = "60.0 s, lm loss 10.9123 -> 8.1234 in 100 iterations, within the band"
        items[node_id] = {"verdict": "passed", "summary": summary, "attempts": [attempt]}
    (root / "run.json").write_text(json.dumps({"schema": 1, "items": items}))
    return root


def seconds(action: Callable[[], object]) -> float:
    """Return how long something takes."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def raw_json(root: Path) -> None:
    """Parse golden and metrics, and write all values as one JSON file."""
    paths = [*root.glob("*/golden.json"), *root.glob("*/repeat_*/attempt_*/phase_*/metrics.json")]
    values = [json.loads(path.read_text()) for path in paths]
    (root / "raw.json").write_text(json.dumps(values))


def report_page(num_steps: int) -> None:
    """Print what the page of one workload takes."""
    with tempfile.TemporaryDirectory() as name:
        root = make_run(Path(name) / "run", num_items=1, num_steps=num_steps)
        pairs = [
            (seconds(lambda: write_in_place(RunReader(root))), seconds(lambda: raw_json(root)))
            for _ in range(ROUNDS)
        ]
        ours = statistics.median(pair[0] for pair in pairs)
        raw = statistics.median(pair[1] for pair in pairs)
        (page,) = root.glob("*/curves.html")
        print(
            f"{NUM_METRICS} metrics x {num_steps} steps: {ours:.3f} s against {raw:.3f} s for raw "
            f"JSON, ratio {ours / raw:.1f}; {page.stat().st_size / 1000:.0f} kB against "
            f"{(root / 'raw.json').stat().st_size / 1000:.0f} kB"
        )


def report_run(num_items: int, num_steps: int) -> None:
    """Print what the pages of a large run take."""
    with tempfile.TemporaryDirectory() as name:
        root = make_run(Path(name) / "run", num_items=num_items, num_steps=num_steps)
        spent = seconds(lambda: write_in_place(RunReader(root)))
        pages = list(root.glob("*/curves.html"))
        with zipfile.ZipFile(root / "pages.zip", "w", zipfile.ZIP_DEFLATED) as packed:
            for page in (*pages, root / "index.html"):
                packed.write(page)
        print(
            f"{num_items} workloads x {NUM_METRICS} metrics x {num_steps} steps: {spent:.1f} s; "
            f"index {(root / 'index.html').stat().st_size / 1000:.0f} kB, all pages "
            f"{sum(page.stat().st_size for page in pages) / 1e6:.1f} MB, as an artifact "
            f"{(root / 'pages.zip').stat().st_size / 1e6:.1f} MB"
        )


def main() -> None:
    """Print sizes and times."""
    report_page(100)
    report_page(10_000)
    report_run(600, 100)


if __name__ == "__main__":
    main()

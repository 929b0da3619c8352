"""How many bugs `strict` finds by the loss, and by the norms of gradient and parameters beside it.

    python benchmarks/compare_norms.py            # from the curves that are kept, five minutes

`curves/norms.json.gz` holds them of three models in bf16: the CPU workload, an
LSTM and convolutions, the last two calm and chaotic; the norm of the
parameters is in the recipes whose name ends in `params`. A golden is made of some reruns as
`--golden refresh` makes it; each rerun that it has not seen, each other platform and each bug is
compared with it. No limit of a gradient was chosen with the convolutions in view, none of the
parameters with the chaotic ones.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from curve_rules import HERE, LOSS, THERE

from pytest_megatron.workloads.golden.build import combine, spread_of
from pytest_megatron.workloads.golden.compare.compare import compare
from pytest_megatron.workloads.golden.model import Golden, MetricMap, Provenance, series_of

FILE = Path(__file__).with_name("curves") / "norms.json.gz"
GRADIENT, PARAMETERS = "grad-norm", "params-norm"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training: `plain`, `rerun`, `platform` or `bug`."""

    group: str
    name: str
    metrics: MetricMap


def main() -> None:
    """Print the table as Markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--draws", type=int, default=10, help="goldens to draw for each row")
    parser.add_argument("--file", type=Path, default=FILE)
    options = parser.parse_args()
    recipes = read_runs(options.file)
    kept = [name for name in recipes if name.endswith("params")]
    print_table({k: v for k, v in recipes.items() if k not in kept}, [GRADIENT], options.draws)
    print()
    print_table({k: recipes[k] for k in kept}, [GRADIENT, PARAMETERS], options.draws)


def print_table(recipes: Mapping[str, Sequence[Run]], norms: Sequence[str], draws: int) -> None:
    """Print what is refused by the loss alone, and with more and more of the norms beside it."""
    print(f"| golden, what is judged | {' | '.join(recipes)} |")
    print("|---|" + "---:|" * len(recipes))
    for repeats in (1, 5, 8):
        for number in range(len(norms) + 1):
            metrics = (LOSS, *norms[:number])
            cells = [score(runs, repeats, metrics, draws) for runs in recipes.values()]
            what = f"{repeats} {'repeats' if repeats > 1 else 'run'}, {' and '.join(metrics)}"
            print(f"| {what} | {' | '.join(cells)} |", flush=True)


def read_runs(file: Path) -> dict[str, list[Run]]:
    """Return recipe to its trainings."""
    found: dict[str, list[Run]] = {}
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        for line in lines:
            for key, kept in json.loads(line).items():
                recipe, group, family, name = key.split("/", 3)
                metrics = {
                    metric: series_of(dict(enumerate(curve, start=1)), is_full_precision=True)
                    for metric, curve in kept.items()
                }
                run = Run(group=group, name=f"{family}: {name}", metrics=metrics)
                found.setdefault(recipe, []).append(run)
    return found


def score(runs: Sequence[Run], repeats: int, metrics: Sequence[str], draws: int) -> str:
    """Return the part of reruns, of other platforms and of bugs that is refused, in percent."""
    rng = random.Random(0)
    reruns = [run for run in runs if run.group == "rerun"]
    refused: dict[str, list[bool]] = {"rerun": [], "platform": [], "bug": []}
    for _ in range(draws):
        chosen = rng.sample(reruns, repeats)
        golden = golden_of([run.metrics for run in chosen])
        for run in runs:
            if run.group == "plain" or run in chosen:
                continue
            compared = compare(
                golden,
                run.metrics,
                metrics=metrics,
                surroundings=THERE if run.group == "platform" else HERE,
            )
            refused[run.group].append(not all(one.passed for one in compared))
    return " / ".join(f"{100 * statistics.fmean(found):.1f}" for found in refused.values())


def golden_of(repeats: Sequence[MetricMap], *, is_deterministic: bool = False) -> Golden:
    """Make a golden; of one run there is no provenance."""
    metrics = combine(repeats, ())
    if len(repeats) == 1:
        return Golden(path="golden", metrics=metrics)
    provenance = Provenance(
        host_class=HERE.host_class,
        versions=HERE.versions,
        precision="bf16",
        repeats=len(repeats),
        deterministic=is_deterministic,
        spread=spread_of(repeats, metrics),
    )
    return Golden(path="golden", metrics=metrics, provenance=provenance)


if __name__ == "__main__":
    main()

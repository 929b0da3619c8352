"""How early a training that fails is stopped, and that no training is stopped which would pass.

    python benchmarks/stop_early.py               # from the curves that are kept, 25 minutes
    python benchmarks/stop_early.py --draws 3     # goldens of other repeats too

Plays each curve of `curves/curves.json.gz` and `curves/norms.json.gz` as a stream, with injected
regressions too: after each step, the run so far is compared as `megatron_stop_early` does, and the
verdict of the whole run beside it. A wrong stop is one of a run that passes at its end. A run is
stopped late if it fails and only its end shows it.
"""

from __future__ import annotations

import argparse
import random
import statistics
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import compare_curves
import compare_norms
from curve_rules import HERE, LOSS, THERE, steps_of

from pytest_megatron.workloads.golden.compare.compare import compare
from pytest_megatron.workloads.golden.compare.result import continued_like
from pytest_megatron.workloads.golden.model import (
    NOWHERE,
    Golden,
    MetricMap,
    RunEnvironment,
    Series,
    series_of,
)
from pytest_megatron.workloads.golden.policy import ComparisonPolicy

MakeGolden = Callable[[Sequence[MetricMap]], Golden]


@dataclass(frozen=True, kw_only=True)
class Stream:
    """A run that is replayed step by step: of a recipe, in a group, whole."""

    recipe: str
    group: str
    metrics: MetricMap


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to compare: a row of the table.

    Attributes:
        repeats: Of how many a golden is made; 0 for repeats that agree bit for bit.
        is_told: Whether the platform of the run is known.
    """

    name: str
    repeats: int
    is_told: bool = False
    is_megatron: bool = False
    nondeterministic: bool = False

    def fails(self, golden: Golden, run: MetricMap, group: str) -> bool:
        """Return whether a run, whole or so far, fails."""
        known: RunEnvironment = THERE if group == "platform" else HERE
        return any(
            not comparison.passed
            for comparison in compare(
                golden,
                run,
                metrics=[name for name in golden.metrics if name in run],
                policy=ComparisonPolicy.MEGATRON if self.is_megatron else ComparisonPolicy.STRICT,
                nondeterministic=self.nondeterministic,
                surroundings=known if self.is_told else NOWHERE,
            )
        )


WAYS = (
    Way(name="strict, golden without repeats", repeats=1),
    Way(name="strict, 2 repeats", repeats=2),
    Way(name="strict, band of 5 repeats", repeats=5),
    Way(name="strict, band of 5 repeats, platform known", repeats=5, is_told=True),
    Way(name="strict, deterministic golden, platform known", repeats=0, is_told=True),
    Way(name="megatron", repeats=1, is_megatron=True),
    Way(name="megatron, nondeterministic", repeats=1, is_megatron=True, nondeterministic=True),
)


@dataclass(kw_only=True)
class Tally:
    """What became of the runs of a row.

    Attributes:
        stopped: Part of its steps after which each run that was stopped was.
    """

    num_prefixes: int = 0
    num_passed: int = 0
    num_wrong: int = 0
    num_late: int = 0
    stopped: list[float] = field(default_factory=list)

    @property
    def row(self) -> str:
        """The cells of the table."""
        num_failed = len(self.stopped) + self.num_late
        saved = sum(1 - part for part in self.stopped) / num_failed if num_failed else 0.0
        at = f"{statistics.median(self.stopped):.0%}" if self.stopped else "-"
        return (
            f"{self.num_passed + num_failed:,} | {self.num_prefixes:,} | {self.num_wrong} | "
            f"{num_failed:,} | {len(self.stopped):,} | {at} | {saved:.0%}"
        )

    def add(self, length: int | None, num_steps: int, *, fails: bool) -> None:
        """Count a run that was stopped after `length` steps, or None."""
        self.num_passed += not fails
        if length is not None and not fails:
            self.num_wrong += 1
        elif length is not None and length < num_steps:
            self.stopped.append(length / num_steps)
        elif fails:
            self.num_late += 1


def main() -> None:
    """Print the table as Markdown; exit with 1 if a run was stopped that would have passed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--draws", type=int, default=1, help="goldens to draw for each recipe")
    options = parser.parse_args()
    print("| golden | runs | prefixes | wrong stops | fail | stopped | after, median | saved |")
    print("|---|" + "---:|" * 7)
    num_wrong = 0
    for what, streams in (("loss", losses()), ("loss and norms", norms())):
        for way in WAYS:
            tally = replay_all(way, streams, options.draws)
            num_wrong += tally.num_wrong
            print(f"| {way.name}, {what} | {tally.row} |", flush=True)
    raise SystemExit(num_wrong > 0)


def losses() -> list[Stream]:
    """Return the curves of the loss, and the injected regressions on those of other platforms."""
    found = []
    injections = compare_curves.injections()
    for run in compare_curves.read_runs(compare_curves.CURVES):
        curves: dict[str, Mapping[int, float | str]] = {"": steps_of(run.losses)}
        if run.group == "platform" and run.recipe in compare_curves.CALM:
            curves |= {name: inject(steps_of(run.losses)) for name, inject in injections.items()}
        found += [
            Stream(
                recipe=run.recipe,
                group=run.group,
                metrics={LOSS: series_of(curve, is_full_precision=True)},
            )
            for curve in curves.values()
        ]
    return found


def norms() -> list[Stream]:
    """Return the curves of loss and norms."""
    return [
        Stream(recipe=recipe, group=run.group, metrics=run.metrics)
        for recipe, runs in compare_norms.read_runs(compare_norms.FILE).items()
        for run in runs
    ]


def replay_all(way: Way, streams: Sequence[Stream], draws: int) -> Tally:
    """Compare every run of every recipe with goldens of random reruns."""
    rng, tally = random.Random(0), Tally()
    for recipe in dict.fromkeys(stream.recipe for stream in streams):
        mine = [stream for stream in streams if stream.recipe == recipe]
        reruns = [stream for stream in mine if stream.group == "rerun"]
        for _ in range(draws):
            chosen = rng.sample(reruns, way.repeats or 1)
            repeats = [stream.metrics for stream in chosen] * (1 if way.repeats else 2)
            golden = golden_of(way, repeats)
            for stream in mine:
                if stream not in chosen:
                    replay(way, golden, stream, tally)
    return tally


def golden_of(way: Way, repeats: Sequence[MetricMap]) -> Golden:
    """Make a golden as the policy's users have it: of Megatron-LM with five decimals."""
    golden = compare_norms.golden_of(repeats, is_deterministic=way.repeats == 0)
    if not way.is_megatron:
        return golden
    loss = {s: round(v, 5) for s, v in golden.metrics[LOSS].finite().items()}
    return Golden(path=golden.path, metrics={LOSS: series_of(loss)})


def replay(way: Way, golden: Golden, stream: Stream, tally: Tally) -> None:
    """Compare a run after each of its steps, up to where it would be stopped."""
    fails = way.fails(golden, stream.metrics, stream.group)
    num_steps, length = 0, None
    for num_steps, so_far in prefixes(stream.metrics):
        tally.num_prefixes += 1
        if way.fails(golden, continued_like(golden.metrics, so_far), stream.group):
            length = num_steps
            break
    tally.add(length, max(len(golden.metrics[LOSS]), num_steps), fails=fails)


def prefixes(metrics: MetricMap) -> Iterator[tuple[int, MetricMap]]:
    """Yield each number of steps with the metrics up to there."""
    for step in sorted({step for series in metrics.values() for step in series.steps}):
        yield step, {name: until(step, series) for name, series in metrics.items()}


def until(step: int, series: Series) -> Series:
    """Return the part of a series up to a step."""
    end = bisect_right(series.steps, step)
    return replace(series, steps=series.steps[:end], values=series.values[:end])


if __name__ == "__main__":
    main()

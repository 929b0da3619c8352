"""How many bugs each comparison finds, and how often it cries wolf, on real trainings.

    python benchmarks/compare_curves.py         # 100 s

`curves/curves.json.gz` holds the losses of the CPU workload: trained as it is, again with the noise
of atomic additions, on other platforms, and with a bug. Two tables:

1. injected: each platform change is compared with the workload as it is, after a shift, a spike or
   a hole was put on it;
2. bugs: a golden is made of some reruns by the code that makes goldens, and each rerun that it has
   not seen, each platform change and each bug is compared with it.

Limits were chosen with all recipes in view but `bf16-unseen`, which was trained after that, with a
seed and a learning rate of its own.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from curve_rules import (
    HERE,
    THERE,
    Curve,
    Pair,
    Rule,
    all_rules,
    flat_tolerance,
    ours,
    ours_told,
    steps_of,
)

from pytest_megatron.workloads.golden.model import Value

CURVES = Path(__file__).with_name("curves") / "curves.json.gz"
CALM = ("fp32", "bf16")
NUM_STEPS, FEW_STEPS = 100, 10

Mutation: TypeAlias = Callable[[dict[int, float]], dict[int, Value]]


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training of the file of curves."""

    recipe: str
    group: str
    family: str
    name: str
    losses: Curve

    def against(self, repeats: Sequence[Curve], run: dict[int, Value]) -> Pair:
        """Return `run`, made of this one, beside the repeats of a golden."""
        return Pair(
            repeats=repeats,
            run=run,
            precision=self.recipe.partition("-")[0],
            surroundings=THERE if self.group == "platform" else HERE,
        )


@dataclass(frozen=True, kw_only=True)
class Score:
    """What one rule said in one recipe; each a list of whether it refused."""

    rerun: list[bool] = field(default_factory=list)
    platform: list[bool] = field(default_factory=list)
    bugs: dict[str, list[bool]] = field(default_factory=dict)


def main() -> None:
    """Print both tables as Markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--draws", type=int, default=10, help="goldens to draw for each rule")
    parser.add_argument("--missed", action="store_true", help="name the bugs that a rule misses")
    parser.add_argument("--file", type=Path, default=CURVES)
    options = parser.parse_args()
    runs = read_runs(options.file)
    print(injected_table(runs))
    print()
    print(bug_table(runs, options.draws, is_listing=options.missed))


def read_runs(file: Path) -> list[Run]:
    """Read the file of curves: one object a line, `recipe/group/family/name` to losses."""
    runs = []
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        for line in lines:
            for key, losses in json.loads(line).items():
                recipe, group, family, name = key.split("/", 3)
                run = Run(recipe=recipe, group=group, family=family, name=name, losses=losses)
                runs.append(run)
    return runs


def injections() -> dict[str, Mutation]:
    """Return the regressions of the first table by name; each takes a curve of 100 steps."""
    nan = math.nan

    def late(fraction: float) -> Mutation:
        return lambda c: {s: v * (1 + fraction * (s > len(c) // 2)) for s, v in c.items()}

    def warp(speed: float) -> Mutation:
        return lambda c: {s: between(c, 1 + (s - 1) * speed) for s in c}

    def at(fraction: float) -> Mutation:
        return lambda c: {**c, 70: c[70] * (1 + fraction)}

    def nans(start: int, stop: int) -> Mutation:
        return lambda c: {s: nan if start <= s < stop else v for s, v in c.items()}

    def without(start: int, stop: int, stride: int = 1) -> Mutation:
        return lambda c: {s: v for s, v in c.items() if s not in range(start, stop, stride)}

    return {
        "none (false alarm)": lambda c: {**c},
        "late +0.1 %": late(0.001),
        "late +0.5 %": late(0.005),
        "late +1 %": late(0.01),
        "late +3 %": late(0.03),
        "late -1 %": late(-0.01),
        "ramp to +1 %": lambda c: {s: v * (1 + 0.01 * s / len(c)) for s, v in c.items()},
        "lr x0.9 (time warp)": warp(0.9),
        "lr x0.5 (time warp)": warp(0.5),
        "data off by one step": lambda c: {s: c[max(1, s - 1)] for s in c},
        "one-step spike +2 %": at(0.02),
        "one-step spike +10 %": at(0.1),
        "one-step spike x2": at(1.0),
        "nan at one step": nans(70, 71),
        "nan in the last half": nans(51, 101),
        "nan at every step": nans(1, 101),
        "1 step missing": without(70, 71),
        "10 % of the steps missing": without(5, 101, 10),
        "truncated at 99 %": without(100, 101),
        "truncated at 50 %": without(51, 101),
        "frozen in the last half": lambda c: {s: c[min(s, 50)] for s in c},
    }


def between(curve: dict[int, float], at: float) -> float:
    """Return the loss between two steps."""
    low = min(int(at), len(curve) - 1)
    return curve[low] + (at - low) * (curve[low + 1] - curve[low])


def injected_table(runs: Sequence[Run]) -> str:
    """Return the detection of injected regressions on the recipes that are not chaotic."""
    rules = [r for r in all_rules() if r.repeats in (0, 1, 5, 8) and r.fails is not flat_tolerance]
    lines = [f"| injected | {' | '.join(r.name for r in rules)} |", "|---|" + "---:|" * len(rules)]
    for name, inject in injections().items():
        cells = []
        for rule in rules:
            found = [
                rule.fails(run.against(base_of(runs, run, rule), inject(steps_of(run.losses))))
                for run in runs
                if run.group == "platform" and run.recipe in CALM
            ]
            cells.append(percent(found))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def base_of(runs: Sequence[Run], run: Run, rule: Rule) -> list[Curve]:
    """Return the golden's repeats: the workload as it is, or the first reruns."""
    group = "rerun" if rule.repeats > 1 else "plain"
    found = [one.losses for one in runs if (one.recipe, one.group) == (run.recipe, group)]
    return found[: rule.repeats or 2]


def bug_table(runs: Sequence[Run], draws: int, *, is_listing: bool) -> str:
    """Return false alarms and detection of real bugs, by recipe."""
    recipes = list(dict.fromkeys(run.recipe for run in runs))
    head = [f"{r}: rerun / platform / bugs / in 10 steps" for r in recipes]
    lines = [f"| rule | {' | '.join(head)} |", "|---|" + "---:|" * len(recipes)]
    for rule in all_rules():
        cells = []
        for recipe in recipes:
            mine = [run for run in runs if run.recipe == recipe]
            score = score_of(rule, mine, draws, NUM_STEPS)
            few = score_of(rule, mine, max(1, draws // 4), FEW_STEPS)
            alarms = f"{percent(score.rerun)} / {percent(score.platform)}"
            cells.append(f"{alarms} / {detection(score)} / {detection(few)}")
            if is_listing and rule.fails in (ours, ours_told):
                missed = [b for b, found in score.bugs.items() if statistics.fmean(found) < 0.5]
                print(f"{rule.name}, {recipe} misses: {', '.join(missed)}", file=sys.stderr)
        lines.append(f"| {rule.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def score_of(rule: Rule, runs: Sequence[Run], draws: int, num_steps: int) -> Score:
    """Compare the first steps of every run of a recipe with goldens of random reruns."""
    rng = random.Random(0)
    reruns = [run for run in runs if run.group == ("rerun" if rule.repeats else "plain")]
    score = Score()
    for _ in range(draws if rule.repeats else 1):
        chosen = reruns if rule.repeats == 0 else rng.sample(reruns, rule.repeats)
        repeats = [run.losses[:num_steps] for run in chosen]
        for run in runs:
            is_fresh = run in reruns and (run not in chosen or rule.repeats == 0)
            if run.group not in ("bug", "platform") and not is_fresh:
                continue
            has_failed = rule.fails(run.against(repeats, {**steps_of(run.losses[:num_steps])}))
            if run.group == "bug":
                score.bugs.setdefault(f"{run.family}: {run.name}", []).append(has_failed)
            else:
                (score.platform if run.group == "platform" else score.rerun).append(has_failed)
    return score


def detection(score: Score) -> str:
    """Return the mean detection of all bugs, in percent."""
    return f"{100 * statistics.fmean(statistics.fmean(found) for found in score.bugs.values()):.1f}"


def percent(found: Sequence[bool]) -> str:
    """Return how many of them are true."""
    return f"{100 * statistics.fmean(found):.1f}"


if __name__ == "__main__":
    main()

"""Count what the refresh gate lets pass and what it wants a reason for, on Megatron-LM's goldens.

    python benchmarks/golden_gate.py CHECKOUT --half held-out
    python benchmarks/golden_gate.py CLONE --history

The first changes the goldens of CHECKOUT for the worse and counts those that pass without a reason.
The second takes every golden that a commit of CLONE added or changed as a candidate and counts
those that need a reason. Cases are divided by a hash of their names; the gate's limits were chosen
on the half `tuning` alone.
"""

from __future__ import annotations

import argparse
import functools
import random
import subprocess
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path, PurePosixPath

from pytest_megatron.errors import GoldenError
from pytest_megatron.runs.record import RecordedWorkload
from pytest_megatron.workloads.golden.model import Golden, Provenance, is_loss, series_of
from pytest_megatron.workloads.golden.store import parse_golden, read_golden
from pytest_megatron.workloads.refresh.gate import Candidate, soft_refusals

LOSS = "lm loss"
FEWEST_VALUES = 8
SPREAD = Provenance(deterministic=False, repeats=5, precision="bf16", spread={LOSS: 3e-4})
# A change of one value: its place, how many there are, the value itself.
Change = Callable[[int, int, float], float]

TAIL, MIDDLE = 0.75, 0.5
REFRESHES: dict[str, Change] = {
    "the last quarter +80 %": lambda i, n, v: v * (1.8 if i >= TAIL * n else 1),
    "-30 %, then +30 %": lambda i, n, v: v * (0.7 if i < MIDDLE * n else 1.3),
    "-30 % and +30 % in turn": lambda i, _, v: v * (0.7 if i % 2 else 1.3) if i else v,
    "-99 %": lambda i, _, v: v * 0.01 if i else v,
    "one step +4 %": lambda i, n, v: v * 1.04 if i == n // 2 else v,
    "one step +1 %": lambda i, n, v: v * 1.01 if i == n // 2 else v,
    "+0.09 %": lambda _i, _n, v: v * 1.0009,
    "-0.09 %": lambda _i, _n, v: v * 0.9991,
    "the last quarter +0.2 %": lambda i, n, v: v * (1.002 if i >= TAIL * n else 1),
    "drift to +1 %": lambda i, n, v: v * (1 + 0.01 * i / n),
}
FIRSTS: dict[str, Change] = {
    "rising from 5.5 to 40": lambda i, n, _: 5.5 + 34.5 * i / n,
    "1e31": lambda i, n, v: 1e31 if i == n // 2 else v,
    "negative": lambda _i, _n, v: -v,
    "constant with noise": lambda i, _n, _v: 10 + random.Random(i).random() * 0.1,
    "ten times as much at the end": lambda i, n, v: v * (10 if i >= TAIL * n else 1),
}


def main() -> None:
    """Print a line for each change."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--half", choices=("tuning", "held-out"), default="held-out")
    parser.add_argument("--history", action="store_true", help="judge what commits brought")
    asked = parser.parse_args()
    if asked.history:
        _judge_history(asked.checkout, asked.half)
        return
    goldens = list(_goldens(asked.checkout, asked.half))
    print(f"{len(goldens)} goldens of the half {asked.half}")
    for what, change in REFRESHES.items():
        missed = sum(_passes(path, _changed(g, change), g) for path, g in goldens)
        known = sum(
            _passes(path, replace(_changed(g, change), provenance=SPREAD), _with_spread(g))
            for path, g in goldens
        )
        print(f"refresh, {what}: {missed} missed, {known} with a known spread of 3e-4")
    for what, change in FIRSTS.items():
        missed = sum(_passes(path, _changed(g, change), None) for path, g in goldens)
        print(f"first golden, {what}: {missed} missed")


def _judge_history(clone: Path, half: str) -> None:
    """Print how many refreshes and first goldens need a reason."""

    @functools.cache
    def golden_at(blob: str) -> Golden | None:
        try:
            return parse_golden(_git(clone, "cat-file", "blob", blob), blob)
        except (GoldenError, UnicodeDecodeError):
            return None

    refreshes: list[tuple[bool, bool]] = []  # needs a reason; a loss changes
    firsts: list[bool] = []
    log = _git(
        clone,
        *("log", "--no-merges", "--raw", "--abbrev=40", "-M", "--diff-filter=AMR", "--format="),
        *("--", "*golden_values*.json"),
    )
    for line in filter(None, log.splitlines()):
        change, *paths = line.split("\t")
        _, _, before, after, status = change.split()
        path = Path(paths[-1])
        if before == after or _is_elsewhere(path, half):
            continue
        old, new = None if status == "A" else golden_at(before), golden_at(after)
        if new is None:
            continue
        needs_reason = not _passes(path, new, old)
        if status == "A":
            firsts.append(needs_reason)
        else:
            known = {} if old is None else old.metrics
            is_moved = any(is_loss(m) and new.metrics.get(m) != s for m, s in known.items())
            refreshes.append((needs_reason, is_moved))
    moved = [needs_reason for needs_reason, is_moved in refreshes if is_moved]
    asked = [needs_reason for needs_reason, _ in refreshes]
    print(f"refreshes of the half {half} that need a reason: {sum(asked)} of {len(asked)}")
    print(f"of those in which a loss changes: {sum(moved)} of {len(moved)}")
    print(f"first goldens: {sum(firsts)} of {len(firsts)}")


def _git(clone: Path, *words: str) -> str:
    command = ["git", "-C", str(clone), *words]
    return subprocess.run(command, capture_output=True, check=True).stdout.decode()


def _is_elsewhere(path: Path, half: str) -> bool:
    """Return whether a golden is of the other half, or is the dump of a second run."""
    is_tuning = zlib.crc32("/".join(path.parts[-3:-1]).encode()) % 2 == 1
    return is_tuning is not (half == "tuning") or "_2nd" in path.name


def _goldens(checkout: Path, half: str) -> Iterator[tuple[Path, Golden]]:
    """Yield the goldens of trainings, with enough values to be a curve."""
    for path in sorted(checkout.rglob("golden_values*.json")):
        if _is_elsewhere(path, half) or "grpo" in str(path):
            continue
        try:
            golden = read_golden(path)
        except GoldenError:
            continue
        loss = golden.metrics.get(LOSS)
        if golden.generation is not None or loss is None:
            continue
        numbers = [value for value in loss.values if isinstance(value, float)]
        if len(numbers) >= FEWEST_VALUES and any(numbers):
            yield path, golden


def _with_spread(golden: Golden) -> Golden:
    return replace(golden, provenance=SPREAD)


def _changed(golden: Golden, change: Change) -> Golden:
    numbers = {k: v for k, v in golden.metrics[LOSS].items() if isinstance(v, float)}
    values = {
        step: change(index, len(numbers), value)
        for index, (step, value) in enumerate(numbers.items())
    }
    return replace(golden, metrics={**golden.metrics, LOSS: series_of(values)})


def _passes(path: Path, candidate: Golden, old: Golden | None) -> bool:
    """Whether the gate asks for no reason."""
    offered = Candidate(
        node_id=str(path),
        target=PurePosixPath(path.name),
        directory=path.parent,
        record=RecordedWorkload(verdict="failed"),
        golden=candidate,
        first_step=1,
        has_cross_entropy="grpo" not in str(path) and "/rl" not in str(path),
    )
    return not list(soft_refusals(offered, old))


if __name__ == "__main__":
    main()

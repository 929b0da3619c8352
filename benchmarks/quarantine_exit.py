"""Flaky items that nobody repairs: how many leave quarantine, as `flaky --propose` proposes it.

`python benchmarks/quarantine_exit.py`. An item runs once at a commit, and again there if it failed.
It is put into quarantine at its third failure, and the history is asked during 300 runs more.
"""

from __future__ import annotations

import random
from dataclasses import replace

from pytest_megatron.runs.history import HistoryEntry, flakiness_cases

RATES = (0.01, 0.03, 0.1, 0.3, 0.6)
KINDS = ("workload", "test")
NUM_ITEMS = 240  # of each rate and kind
NUM_HELD = 300
NUM_FAILURES = 3
SHORT = 3  # passes in a row, with which no item leaves
ENTRY = HistoryEntry(
    time="",
    run="r",
    node_id="item",
    kind="",
    verdict="",
    num_attempts=1,
    causes=(),
    duration_s=1.0,
    commit=None,
    is_dirty=False,
    platform="cpu",
)


def has_left(chance: random.Random, rate: float, kind: str) -> bool:
    """Return whether an item of that flake rate is proposed to leave."""
    entries: list[HistoryEntry] = []
    commit = num_failed = num_held = num_passed = 0
    while num_held < NUM_HELD:
        commit += 1
        for attempt in range(2):
            is_bad = chance.random() < rate
            if is_bad and num_held and num_passed > SHORT and is_proposed(entries):
                return True
            num_passed = 0 if is_bad else num_passed + 1
            is_held = num_failed >= NUM_FAILURES
            if kind == "workload" or num_failed or is_bad:  # a test has lines from its failure on
                entry = replace(ENTRY, kind=kind, time=f"{commit:07}.{attempt}", commit=str(commit))
                verdict = "failed" if is_bad else "passed"
                entries.append(replace(entry, verdict=verdict, is_quarantined=is_held))
            num_failed += is_bad
            num_held += is_held
            if not is_bad:
                break
    return is_proposed(entries)


def is_proposed(entries: list[HistoryEntry]) -> bool:
    """Return whether the item would leave now."""
    return any(case.is_over for case in flakiness_cases(entries))


def main() -> None:
    """Print the share of each rate, and of all."""
    chance = random.Random(21)
    total = 0
    for kind in KINDS:
        for rate in RATES:
            num_left = sum(has_left(chance, rate, kind) for _ in range(NUM_ITEMS))
            total += num_left
            print(
                f"{kind:<8} {rate:4.0%}: {num_left} of {NUM_ITEMS} left, {num_left / NUM_ITEMS:.1%}"
            )
    number = NUM_ITEMS * len(RATES) * len(KINDS)
    print(f"all: {total} of {number} left, {total / number:.1%}")


if __name__ == "__main__":
    main()

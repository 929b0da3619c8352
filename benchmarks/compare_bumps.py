"""How `strict` judges real changes of container: the history of Megatron-LM's own goldens.

    git clone https://github.com/NVIDIA/Megatron-LM
    python benchmarks/compare_bumps.py Megatron-LM            # two minutes

A pair is a golden before and after a commit whose subject names a new container, PyTorch or
Transformer Engine. All but two sets of BERT (a bug of data order, found later) count as benign.
Half of the workloads, by the hash of their name, was in view when limits were chosen; the other
half is printed by itself.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import statistics
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_megatron.golden.compare.api import compare
from pytest_megatron.golden.compare.limits import LONG_STEPS
from pytest_megatron.golden.model import MetricMap, Series, Value, series_of
from pytest_megatron.golden.provenance import Golden

CASES = "tests/functional_tests/test_cases"
LOSS, ZEROS = "lm loss", "num-zeros"
BUMP = re.compile(
    r"bump|base image|container|docker image|pytorch base|upgrade|PyT ?\d|pytorch to|TE ?2\.\d"
    r"|transformer.engine dependency|devel` image|26\.0\d|25\.\d\d|24\.10",
    re.IGNORECASE,
)
BUGS = ("f5b2ec01", "64bee49c")  # of bert, whose order of data changed there
_CHANGE = re.compile(r":\d+ \d+ (\w+) (\w+) M\t(.*golden_values.*\.json)")


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A golden before and after a change of container."""

    workload: str
    old: MetricMap
    new: MetricMap

    @property
    def is_held_out(self) -> bool:
        """Whether no limit was chosen with it in view."""
        return hashlib.sha256(self.workload.encode()).digest()[0] % 2 == 1

    def fails(self, metric: str, change: Callable[[list[float]], list[float]]) -> bool | None:
        """Return whether the new values, changed, are refused; None where they cannot be judged."""
        old, new = self.old.get(metric), self.new.get(metric)
        if old is None or new is None or old.steps != new.steps:
            return None
        if metric == LOSS and not all(isinstance(v, float) for v in (*old.values, *new.values)):
            return None
        numbers = [v for v in new.values if isinstance(v, float)]
        changed = iter(change(numbers))
        run = {s: next(changed) if isinstance(v, float) else v for s, v in new.items()}
        golden = Golden(path="golden", metrics=self.old)
        (answer,) = compare(golden, {metric: series_of(run)}, metrics=[metric])
        return not answer.passed


def main() -> None:
    """Print the table as Markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("repository", type=Path, help="a clone of Megatron-LM with its history")
    pairs = list(read_pairs(parser.parse_args().repository))
    print("| metric, length | half | pairs | " + " | ".join(CHANGES) + " |")
    print("|---|---|---:|" + "---:|" * len(CHANGES))
    for metric, is_long in ((LOSS, False), (LOSS, True), (ZEROS, False)):
        for is_held_out in (False, True):
            chosen = [
                pair
                for pair in pairs
                if pair.is_held_out is is_held_out
                and metric in pair.old
                and (len(pair.old[metric]) > LONG_STEPS) is is_long
            ]
            rows = [refused(chosen, metric, change) for change in CHANGES.values()]
            length = f"over {LONG_STEPS}" if is_long else f"to {LONG_STEPS}"
            half = "held out" if is_held_out else "in view"
            cells = " | ".join(f"{100 * statistics.fmean(row):.1f}" for row in rows)
            print(f"| {metric}, {length} | {half} | {len(rows[0])} | {cells} |", flush=True)
    for is_held_out in (False, True):
        mine = [pair for pair in pairs if pair.is_held_out is is_held_out]
        alarms = [any(p.fails(m, CHANGES["none"]) for m in (LOSS, ZEROS)) for p in mine]
        name = "held out" if is_held_out else "in view"
        print(f"{name}, either metric: {100 * statistics.fmean(alarms):.1f} % of {len(mine)}")


def refused(
    pairs: Sequence[Pair], metric: str, change: Callable[[list[float]], list[float]]
) -> list[bool]:
    """Return for each pair that can be judged whether it is refused."""
    return [found for pair in pairs if (found := pair.fails(metric, change)) is not None]


def _from(part: float, factor: float) -> Callable[[list[float]], list[float]]:
    return lambda v: [x * (factor if i >= part * len(v) else 1.0) for i, x in enumerate(v)]


def _at_one(factor: float) -> Callable[[list[float]], list[float]]:
    return lambda v: [x * (factor if i == int(0.7 * len(v)) else 1.0) for i, x in enumerate(v)]


CHANGES: Mapping[str, Callable[[list[float]], list[float]]] = {
    "none": lambda v: v,
    "one step +0.5 %": _at_one(1.005),
    "one step +5 %": _at_one(1.05),
    "late +0.1 %": _from(0.5, 1.001),
    "late +0.3 %": _from(0.5, 1.003),
    "all +10 %": _from(0.0, 1.1),
    "late half 0": _from(0.5, 0.0),
}


def read_pairs(repository: Path) -> Iterator[Pair]:
    """Yield every pair in which both sides are metric maps."""
    log = _git(repository, "log", "--no-merges", "--format=%H %s", "--", CASES)
    for line in log.splitlines():
        commit, _, subject = line.partition(" ")
        if not BUMP.search(subject):
            continue
        for row in _git(repository, "diff-tree", "-r", commit, "--", CASES).splitlines():
            found = _CHANGE.fullmatch(row)
            if found is None:
                continue
            workload = str(Path(found[3]).parent.relative_to(CASES))
            old, new = (_series(_git(repository, "cat-file", "blob", found[i])) for i in (1, 2))
            is_bug = workload.startswith("bert") and commit.startswith(BUGS)
            if old and new and not is_bug:
                yield Pair(workload=workload, old=old, new=new)


def _series(text: str) -> dict[str, Series]:
    found: dict[str, Series] = {}
    try:
        blocks = json.loads(text)
    except ValueError:
        return found
    for name, block in blocks.items() if isinstance(blocks, dict) else ():
        values = block.get("values") if isinstance(block, dict) else None
        if isinstance(values, dict) and values:
            known: dict[int, Value] = {
                int(s): v if isinstance(v, str) else float(v) for s, v in values.items()
            }
            found[name] = series_of(known)
    return found


def _git(repository: Path, *words: str) -> str:
    command = ["git", "-C", str(repository), *words]
    return subprocess.run(command, capture_output=True, check=True, text=True).stdout


if __name__ == "__main__":
    main()

"""How `strict` judges real changes of container: the history of Megatron-LM's own goldens.

    git clone https://github.com/NVIDIA/Megatron-LM
    python benchmarks/compare_bumps.py Megatron-LM            # two minutes

A pair is a golden before and after a commit whose subject names a new container, PyTorch or
Transformer Engine. All but two sets of BERT (a bug of data order, found later) count as benign.
Half of the workloads, by the hash of their name, was in view when limits were chosen; the other
half is printed by itself.

    python benchmarks/compare_bumps.py Megatron-LM --long     # one minute

prints every pair of losses of more than 200 values that the history has, whatever the commit was:
before and after a commit, and of both containers (lts, dev) where one commit recorded them.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import math
import re
import statistics
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path, PurePosixPath

from pytest_megatron.errors import GoldenError
from pytest_megatron.workloads.golden.compare.compare import compare
from pytest_megatron.workloads.golden.compare.strict import LONG_STEPS
from pytest_megatron.workloads.golden.model import Golden, MetricMap, Series, series_of
from pytest_megatron.workloads.golden.store import parse_golden

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
    parser.add_argument("--long", action="store_true", help="print all pairs of long losses")
    options = parser.parse_args()
    if options.long:
        print_long_pairs(options.repository)
        return
    pairs = list(read_pairs(options.repository))
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


@dataclass(frozen=True, kw_only=True)
class Change:
    """A golden that a commit changes; `old` and `new` are its blobs."""

    commit: str
    subject: str
    path: PurePosixPath
    old: str
    new: str

    @property
    def workload(self) -> str:
        """The model and the test case."""
        return str(self.path.parent.relative_to(CASES))


def read_changes(repository: Path) -> Iterator[Change]:
    """Yield every change of a golden, the newest commit first."""
    log = ("log", "--no-merges", "--raw", "--abbrev=40", "--no-renames", "--diff-filter=M")
    commit = subject = ""
    for line in _git(repository, *log, "--format=%H %s", "--", CASES).splitlines():
        if found := _CHANGE.fullmatch(line):
            path = PurePosixPath(found[3])
            yield Change(commit=commit, subject=subject, path=path, old=found[1], new=found[2])
        elif line and not line.startswith(":"):
            commit, _, subject = line.partition(" ")


def read_pairs(repository: Path) -> Iterator[Pair]:
    """Yield every pair around a new container in which both sides are metric maps."""
    for change in read_changes(repository):
        is_bug = change.workload.startswith("bert") and change.commit.startswith(BUGS)
        if is_bug or not BUMP.search(change.subject):
            continue
        old, new = (
            _series(_git(repository, "cat-file", "blob", b)) for b in (change.old, change.new)
        )
        if old and new:
            yield Pair(workload=change.workload, old=old, new=new)


def print_long_pairs(repository: Path) -> None:
    """Print a line for each pair of long losses: how far its windows are off, and the verdict."""
    seen: set[frozenset[tuple[float, ...]]] = set()
    at_commit: dict[tuple[str, PurePosixPath], Series] = {}
    read = functools.cache(lambda blob: _series(_git(repository, "cat-file", "blob", blob)))
    for change in read_changes(repository):
        old, new = read(change.old).get(LOSS), read(change.new).get(LOSS)
        if old is None or new is None or "_2nd" in change.path.name or len(new) <= LONG_STEPS:
            continue
        at_commit[change.commit, change.path] = new
        lts = change.path.with_name(change.path.name.replace("_dev", "_lts"))
        dev = change.path.with_name(change.path.name.replace("_lts", "_dev"))
        both = [at_commit.get((change.commit, path)) for path in (lts, dev)]
        compared = [(old, new, change.subject)]
        if lts != dev and both[0] is not None and both[1] is not None:
            compared.append((both[0], both[1], "lts and dev"))
        for one, other, why in compared:
            values = frozenset(map(_numbers, (one, other)))
            if one.steps == other.steps and len(values) > 1 and values not in seen:
                seen.add(values)
                pair = Pair(workload=change.workload, old={LOSS: one}, new={LOSS: other})
                half = "held out" if pair.is_held_out else "in view"
                path = change.path.relative_to(CASES)
                print(f"{half}, {path}, {change.commit[:8]} {why}: {describe_long(one, other)}")


def describe_long(old: Series, new: Series) -> str:
    """Return the verdict on one loss and the deviation of the mean of each tenth, in 1e-3."""
    (answer,) = compare(Golden(path="golden", metrics={LOSS: old}), {LOSS: new}, metrics=[LOSS])
    pairs = [
        (a, b)
        for a, b in zip(old.values, new.values, strict=True)
        if isinstance(a, float) and isinstance(b, float)
    ]
    cuts = [len(pairs) * i // 10 for i in range(11)]
    sums = [tuple(map(math.fsum, zip(*pairs[a:b], strict=True))) for a, b in pairwise(cuts)]
    tenths = " ".join(f"{1e3 * (b - a) / a:+.1f}" for a, b in sums)
    failed = ", ".join(layer.layer for layer in answer.layers if not layer.passed)
    return f"{f'refused ({failed})' if failed else 'passes'}; {tenths}"


def _numbers(series: Series) -> tuple[float, ...]:
    return tuple(value for value in series.values if isinstance(value, float))


def _series(text: str) -> MetricMap:
    try:
        return parse_golden(text, "golden").metrics
    except GoldenError:
        return {}


def _git(repository: Path, *words: str) -> str:
    command = ["git", "-C", str(repository), *words]
    return subprocess.run(command, capture_output=True, check=True, text=True).stdout


if __name__ == "__main__":
    main()

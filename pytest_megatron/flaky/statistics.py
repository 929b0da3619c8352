"""How often items were flaky, and whether their failures are no chance any more. Pure."""

from __future__ import annotations

import datetime as dt
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from pytest_megatron.base.text import grouped
from pytest_megatron.runs.history import HistoryEntry

# Risk that an item leaves quarantine and is as flaky as before: 5 % at most, for items are put into
# it when they have just failed, which makes their rates look higher than they are.
_RISK = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryRecord:
    """Outcomes of an item in the chosen runs.

    Attributes:
        num_runs: In which it ran and was noted.
        num_flaky: Number of them in which it passed only when it was run again.
        num_bad: In which it failed or was broken.
        causes: Signature -> how many attempts failed of it, the most frequent first.
        num_contradictory: Runs in which it failed at a commit at which it also passed.
        first_seen, last_seen: When it was first and last flaky, failed or broken.
        is_in_quarantine: Whether it was in its last run.
    """

    node_id: str
    num_runs: int
    num_flaky: int
    num_bad: int
    causes: tuple[tuple[str, int], ...]
    num_contradictory: int
    first_seen: str
    last_seen: str
    is_in_quarantine: bool

    @property
    def share(self) -> float:
        """Share of runs in which it was flaky, or failed at a commit at which it also passed."""
        return (self.num_flaky + self.num_contradictory) / self.num_runs

    @property
    def is_contradictory(self) -> bool:
        """True if it passed and failed at the same commit."""
        return self.num_contradictory > 0


def flaky_records(
    entries: Sequence[HistoryEntry], *, since: str = "", min_runs: int = 1
) -> tuple[HistoryRecord, ...]:
    """Return the items that were flaky or contradicted themselves, the worst first.

    Args:
        entries: Entries in any order.
        since: Entries before this time are left out.
        min_runs: Items with fewer runs are left out.
    """
    by_item = _by_item(entries, since)
    records = [_record(name, found) for name, found in by_item.items() if len(found) >= min_runs]
    kept = [record for record in records if record.num_flaky or record.is_contradictory]
    return tuple(sorted(kept, key=lambda r: (-r.share, -r.num_flaky, -r.num_bad, r.node_id)))


def _by_item(entries: Iterable[HistoryEntry], since: str) -> dict[str, list[HistoryEntry]]:
    """Return the entries of each item from a time on, in the order of time."""
    ordered = sorted(entries, key=lambda entry: entry.time)
    return grouped((entry.node_id, entry) for entry in ordered if entry.time >= since)


def _outcomes(entries: Iterable[HistoryEntry]) -> dict[tuple[str, str], list[bool]]:
    """Return (commit, platform) -> whether each run of it was good."""
    return grouped((_revision(one), one.is_good) for one in entries if one.is_counted)


def _revision(entry: HistoryEntry) -> tuple[str, str]:
    return str(entry.commit), entry.platform


def _record(node_id: str, entries: Sequence[HistoryEntry]) -> HistoryRecord:
    """Return the counts of an item over its runs."""
    odd = [e for e in entries if e.verdict not in ("passed", "skipped")]
    causes = Counter(cause for entry in entries for cause in entry.causes)
    outcomes = _outcomes(entries)
    return HistoryRecord(
        node_id=node_id,
        num_runs=len(entries),
        num_flaky=sum(e.verdict == "flaky" for e in entries),
        num_bad=sum(e.verdict not in ("passed", "flaky", "skipped") for e in entries),
        causes=tuple(causes.most_common()),
        num_contradictory=sum(found.count(False) for found in outcomes.values() if any(found)),
        first_seen=odd[0].time if odd else "",
        last_seen=odd[-1].time if odd else "",
        is_in_quarantine=entries[-1].is_in_quarantine,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureStreak:
    """The last runs of an item, all of which failed, and what it did before.

    Attributes:
        num_failed: Number of these runs.
        num_needed: So many failures in a row an item that is as flaky as before has with 5 % at
            most, over its whole stay in quarantine.
        since: The commit of the first of them; empty without one.
        num_bad_before, num_before: Runs before them that failed, and all.
        num_dirty: Runs after all of these that failed, and do not count as the tree had changes.
    """

    num_failed: int
    num_needed: int
    since: str
    num_bad_before: int
    num_before: int
    num_dirty: int = 0

    @property
    def num_known(self) -> int:
        """Number of runs that are known."""
        return self.num_before + self.num_failed


def failure_streak(entries: Iterable[HistoryEntry], platform: str) -> FailureStreak:
    """Return how often an item failed in a row, by the runs that are known.

    Where no run is known that passed, one counts as if it had: an item that fails ever since it is
    known is broken, and not flaky.

    Args:
        entries: Those of the item alone, on every platform.
        platform: Where it runs now.
    """
    own = [entry for entry in dict.fromkeys(entries) if entry.platform == platform]
    own.sort(key=lambda run: run.time)
    uncounted = takewhile(lambda run: not run.is_counted, reversed(own))
    runs = [run for run in own if run.is_counted]
    last = list(takewhile(lambda run: not run.is_good, reversed(runs)))
    before = runs[: len(runs) - len(last)]
    num_bad = sum(not run.is_good for run in before)
    pairs = itertools.pairwise(before)
    ended = [bad for bad, good in pairs if good.is_good and not bad.is_good]
    more = clean_runs_needed(  # with the parts of failures and passes exchanged
        max(1, len(before) - num_bad),
        num_bad,
        num_restarts=sum(run.is_in_quarantine for run in ended),
    )
    return FailureStreak(
        num_failed=len(last),
        num_needed=1 + more,  # each failure after a pass begins another try
        since=str(last[-1].commit) if last else "",
        num_bad_before=num_bad,
        num_before=len(before),
        num_dirty=sum(run.is_dirty and not run.is_good for run in uncounted),
    )


def clean_runs_needed(num_bad: int, num_good: int, *, num_restarts: int = 0) -> int:
    """Return after how many passes in a row an item is unlikely to be as flaky as before.

    The rate itself is not known. It has a beta distribution (from Jeffreys' prior), over which the
    chance of so many passes is averaged. A failure in quarantine begins another try, and each try
    gets a smaller share of the risk: 1/2, 1/6, 1/12, ...

    Args:
        num_bad: Runs that failed before.
        num_good: Runs that passed before.
        num_restarts: Failures in quarantine.
    """
    share = math.log(_RISK / ((num_restarts + 1) * (num_restarts + 2)))
    good, bad = num_good + 0.5, num_bad + 0.5
    low, high = 0, 1 << 20
    while high - low > 1:
        middle = (low + high) // 2
        chance = math.lgamma(good + middle) - math.lgamma(good)
        chance += math.lgamma(good + bad) - math.lgamma(good + bad + middle)
        low, high = (low, middle) if chance <= share else (middle, high)
    return high


def days_ago(days: float) -> str:
    """Return that time in the form of `Entry.time`."""
    then = dt.datetime.now(dt.UTC) - dt.timedelta(days=days)
    return then.strftime("%Y-%m-%dT%H:%M:%SZ")

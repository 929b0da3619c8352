"""How often items were flaky, and whether their failures are no chance any more. Pure."""

from __future__ import annotations

import datetime as dt
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from pytest_megatron.base.text import grouped
from pytest_megatron.runs.history import HistoryEntry

# Of so many failures in a row to be chance. A stay in quarantine of 200 runs has as many tries.
_RISK = 2.5e-4


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


def flaky_records(entries: Sequence[HistoryEntry], *, since: str = "") -> tuple[HistoryRecord, ...]:
    """Return the items that were flaky or contradicted themselves, the worst first.

    Args:
        entries: Entries in any order.
        since: Entries before this time are left out.
    """
    ordered = sorted(entries, key=lambda entry: entry.time)
    by_item = grouped((entry.node_id, entry) for entry in ordered if entry.time >= since)
    records = [_record(name, found) for name, found in by_item.items()]
    kept = [record for record in records if record.num_flaky or record.is_contradictory]
    return tuple(sorted(kept, key=lambda r: (-r.share, -r.num_flaky, -r.num_bad, r.node_id)))


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
        num_needed: So many failures in a row are no chance for an item that is as flaky as before.
        since: The commit of the first of them; empty without one.
        num_bad_before, num_before: Runs before them that failed, and all.
    """

    num_failed: int
    num_needed: int
    since: str
    num_bad_before: int
    num_before: int


def failure_streak(entries: Iterable[HistoryEntry], platform: str) -> FailureStreak:
    """Return how often an item failed in a row, by the runs that are known.

    One that failed and one that passed are added to those before: an item that fails ever since it
    is known is broken, and not flaky.

    Args:
        entries: Those of the item alone, on every platform.
        platform: Where it runs now.
    """
    own = [run for run in dict.fromkeys(entries) if run.platform == platform and run.is_counted]
    runs = sorted(own, key=lambda run: run.time)
    last = list(takewhile(lambda run: not run.is_good, reversed(runs)))
    before = runs[: len(runs) - len(last)]
    num_bad = sum(not run.is_good for run in before)
    rate = (num_bad + 1) / (len(before) + 2)
    return FailureStreak(
        num_failed=len(last),
        num_needed=math.ceil(math.log(_RISK) / math.log(rate)),
        since=str(last[-1].commit) if last else "",
        num_bad_before=num_bad,
        num_before=len(before),
    )


def days_ago(days: float) -> str:
    """Return that time in the form of `Entry.time`."""
    then = dt.datetime.now(dt.UTC) - dt.timedelta(days=days)
    return then.strftime("%Y-%m-%dT%H:%M:%SZ")

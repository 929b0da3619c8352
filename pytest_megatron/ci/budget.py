"""Expected cost of jobs by the history of runs, and budgets for it. Pure."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from pytest_megatron.base.findings import Finding, Severity
from pytest_megatron.base.project import ProjectConfig
from pytest_megatron.base.text import counted, grouped, listed
from pytest_megatron.ci.decide import Trigger, decision_by
from pytest_megatron.ci.jobs import CiJob, DroppedJob, PlanBudget
from pytest_megatron.ci.table import BUDGET, CiTable, DecisionRule, load_table
from pytest_megatron.errors import ConfigError
from pytest_megatron.gpu.host import CPU_PLATFORM
from pytest_megatron.runs.history import HistoryEntry, device_time
from pytest_megatron.workloads.recipe.lint import RowCheck
from pytest_megatron.workloads.recipe.model import UNIT_MODEL, Vocabulary, Workload, failing

_BUDGET = re.compile(BUDGET).fullmatch
_SECONDS = {"h": 3600.0, "min": 60.0}
_NUM_RECENT = 5  # runs of which the median is the price
_MOST_NAMED = 2
_MOST_DEAREST = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """An amount of GPU time, or of time of processes on the CPU.

    Attributes:
        text: As it was given.
        device: `GPU` or `rank`.
    """

    text: str
    device: str
    seconds: float


def parse_budget(text: str, where: str) -> Budget:
    """Read `2h`, `40 GPU-h` or `3 rank-h`; without a device, GPUs are meant.

    Raises:
        ConfigError: It is none of these.
    """
    match = _BUDGET(text)
    if match is None:
        raise ConfigError(
            where, f"found {text!r}, expected GPU time such as 2h or '40 GPU-h', or '3 rank-h'"
        )
    return Budget(text=text, device=match[2] or "GPU", seconds=float(match[1]) * _SECONDS[match[3]])


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemHistory:
    """The history of a workload, or of the tests of a file.

    Attributes:
        price_s: Devices times seconds of one repeat, or of all tests of the file.
        num_runs: In which it ran.
        caught: Commits at which it began to fail for a reason of the code; the name of the run
            where the commit is not known.
        failed: All at which it failed so.
    """

    price_s: float
    num_runs: int
    caught: frozenset[str]
    failed: frozenset[str]


Histories: TypeAlias = Mapping[tuple[str, str], ItemHistory]  # name and device


def item_histories(entries: Iterable[HistoryEntry], *, is_lightweight: bool) -> Histories:
    """Return the history of each workload and of each file of tests on each kind of device.

    Args:
        entries: Entries in any order. Without a cost, an item has no history here.
        is_lightweight: The kind of trainings of which the price is asked.
    """
    found = grouped(
        ((e.node_id if e.kind == "workload" else e.node_id.partition("::")[0], e.device), e)
        for e in sorted(entries, key=lambda e: e.time)
    )
    histories: dict[tuple[str, str], ItemHistory] = {}
    for key, own in found.items():
        price_s = _price(own, is_lightweight=is_lightweight)
        if price_s is not None:
            caught, failed = _failures(own)
            num_runs = len({entry.run for entry in own})
            histories[key] = ItemHistory(
                price_s=price_s, num_runs=num_runs, caught=caught, failed=failed
            )
    return histories


def _price(entries: Sequence[HistoryEntry], *, is_lightweight: bool) -> float | None:
    """Return the median cost of recent runs; of trainings, those that came to their end if any."""
    costs: dict[str, float] = {}
    of_bad: dict[str, float] = {}
    for entry in entries:
        is_workload = entry.kind == "workload"
        if not entry.device_s or (is_workload and entry.is_lightweight != is_lightweight):
            continue
        into = of_bad if is_workload and not entry.is_good else costs
        into[entry.run] = into.get(entry.run, 0.0) + entry.device_s / entry.num_repeats
    recent = list((costs or of_bad).values())[-_NUM_RECENT:]
    return statistics.median(recent) if recent else None


def _failures(entries: Sequence[HistoryEntry]) -> tuple[frozenset[str], frozenset[str]]:
    """Return where items began to fail, and where they failed.

    A failure of the infrastructure, in quarantine, or at a commit at which the item also passed is
    none.
    """
    passed = {(e.node_id, _revision(e)) for e in entries if e.is_good}
    caught: set[str] = set()
    failed: set[str] = set()
    still_failing: set[str] = set()
    for entry in entries:
        revision = _revision(entry)
        if entry.is_good:
            still_failing.discard(entry.node_id)
        is_transient = entry.kind == "test" and bool(entry.causes)  # it failed once more
        is_failure = entry.verdict == "failed" and not (entry.is_quarantined or is_transient)
        if is_failure and (entry.node_id, revision) not in passed:
            failed.add(revision)
            if entry.node_id not in still_failing:
                caught.add(revision)
            still_failing.add(entry.node_id)
    return frozenset(caught), frozenset(failed)


def _revision(entry: HistoryEntry) -> str:
    return entry.run if entry.commit is None or entry.is_dirty else entry.commit


@dataclass(frozen=True, slots=True)
class _PricedJob:
    """A job with what it costs and finds.

    Attributes:
        items: The node id of a workload, or the files of tests.
    """

    job: CiJob
    items: tuple[str, ...]
    price_s: float
    num_runs: int
    caught: frozenset[str]
    failed: frozenset[str]

    def value(self, holders: Counter[str]) -> float:
        """Return failures that a run finds and no other job does, for its price.

        Half a failure and half a run of none are added: few runs prove little.
        """
        alone = sum(holders[revision] <= 1 for revision in self.caught)
        return (alone + 0.5) / (self.num_runs + 1) / self.price_s


def price_job(job: CiJob, items: Sequence[str], histories: Histories) -> _PricedJob | None:
    """Return a job with its price; None where an item of it has no history."""
    found = [histories.get((item, job.device)) for item in items]
    known = [one for one in found if one is not None]
    if not known or len(known) < len(found):
        return None
    return _PricedJob(
        job=job,
        items=tuple(items),
        price_s=sum(one.price_s for one in known) * job.n_repeat,
        num_runs=max(one.num_runs for one in known),
        caught=frozenset[str]().union(*(one.caught for one in known)),
        failed=frozenset[str]().union(*(one.failed for one in known)),
    )


def keep_within(
    budget: Budget,
    jobs: Sequence[CiJob],
    files: Mapping[str, tuple[str, ...]],
    histories: Histories,
) -> tuple[tuple[CiJob, ...], PlanBudget]:
    """Return the jobs that a budget has room for, and what became of the others.

    The job that finds least for its price goes first, until the others fit; of the dropped ones,
    those that fit into what is left then come back, the last first. Jobs without history and those
    on other devices stay, and do not count.

    Args:
        budget: At most so much is expected to be used.
        jobs: In the order of the plan.
        files: Id of a job of unit tests -> its files.
        histories: Histories of workloads and files.
    """
    mine = [job for job in jobs if job.device == budget.device]
    priced = {
        job.id: found
        for job in mine
        if (found := price_job(job, files.get(job.id, (job.name,)), histories)) is not None
    }
    kept = dict(priced)
    holders = Counter(revision for one in kept.values() for revision in one.failed)
    expected_s = sum(one.price_s for one in kept.values())
    dropped: list[_PricedJob] = []
    while expected_s > budget.seconds:
        worst = min(kept.values(), key=lambda one: (one.value(holders), -one.price_s, one.job.id))
        dropped.append(kept.pop(worst.job.id))
        holders.subtract(worst.failed)
        expected_s = sum(one.price_s for one in kept.values())
    for one in reversed(dropped):
        if expected_s + one.price_s <= budget.seconds:
            kept[one.job.id] = one
            expected_s += one.price_s
    gone = [one for one in dropped if one.job.id not in kept]
    names = {one.job.id for one in gone}
    return tuple(job for job in jobs if job.id not in names), PlanBudget(
        limit=budget.text,
        device=budget.device,
        limit_s=budget.seconds,
        expected_s=round(expected_s, 3),
        unknown=tuple(job.name for job in mine if job.id not in priced),
        num_others=len(jobs) - len(mine),
        dropped=tuple(_dropped(one, kept.values()) for one in gone),
    )


def _dropped(one: _PricedJob, kept: Iterable[_PricedJob]) -> DroppedJob:
    """Return what the plan says of a job that is dropped."""
    return DroppedJob(
        name=one.job.name,
        items=one.items,
        price_s=round(one.price_s, 3),
        num_runs=one.num_runs,
        num_caught=len(one.caught),
        reason=_reason(one, kept),
    )


def _reason(one: _PricedJob, kept: Iterable[_PricedJob]) -> str:
    """Describe what a job caught, and which kept jobs caught the same."""
    runs = counted(one.num_runs, "run")
    if not one.caught:
        return f"caught nothing in {runs}"
    left = set(one.caught)
    names: list[str] = []
    for other in sorted(kept, key=lambda other: -len(one.caught & other.failed)):
        if left & other.failed:
            left -= other.failed
            names.append(other.job.name)
    caught = counted(len(one.caught), "failure")
    if not left:
        return f"caught {caught} in {runs}, each with {listed(names, _MOST_NAMED)}"
    return f"caught {caught} in {runs}, {len(left)} of them alone; the others catch more for less"


def budget_lines(found: PlanBudget) -> list[str]:
    """Return the lines of a plan about its budget."""
    expected = device_time(found.expected_s, found.device)
    dropped = counted(len(found.dropped), "job")
    lines = [f"budget {found.limit}: {expected} expected, {dropped} not run"]
    if found.unknown:
        lines.append(f"  without history, so run and not counted: {listed(found.unknown, 3)}")
    if found.num_others:
        kind = "CPU" if found.device == "GPU" else "GPUs"
        lines.append(f"  on the {kind}, so not counted: {counted(found.num_others, 'job')}")
    lines += [
        f"  not run: {one.name}, {device_time(one.price_s, found.device)}: {one.reason}"
        for one in found.dropped
    ]
    return lines


def lint_budgets(
    config: ProjectConfig,
    vocabulary: Vocabulary,
    root: Path,
    history: Callable[[], Sequence[HistoryEntry]],
) -> RowCheck:
    """Return a check of budgets, see `ProjectLint`."""
    table = load_table(config, vocabulary)
    entries = history() if table.budget else ()
    return lambda rows, _: check_budgets(tuple(rows), table, entries, config.file or root)


def check_budgets(
    workloads: Sequence[Workload], table: CiTable, entries: Sequence[HistoryEntry], file: Path
) -> Iterator[Finding]:
    """Yield the scopes whose expected cost is above their budget, or not known.

    Args:
        workloads: The rows of the project.
        table: Table with budgets and rules.
        entries: The history of runs.
        file: The one with the table.
    """
    histories = {
        kind: item_histories(entries, is_lightweight=kind) if table.budget else {}
        for kind in (False, True)
    }
    for scope, text in table.budget.items():
        budget = parse_budget(text, str(file))
        costs = [
            _cost_by(rule, scope, workloads, table, histories[rule.is_lightweight])
            for rule in table.rules
            if scope in rule.scope
        ]
        dearest = max(costs, key=lambda cost: (cost.total_s(budget.device), len(cost.unknown)))
        if (finding := _finding(scope, budget, dearest, file)) is not None:
            yield finding


@dataclass(frozen=True, slots=True, kw_only=True)
class _ScopeCost:
    """Cost of the rows of a scope where one rule runs them.

    Attributes:
        unknown: Jobs without history.
    """

    rule: DecisionRule
    priced: tuple[_PricedJob, ...]
    unknown: tuple[CiJob, ...]

    def total_s(self, device: str) -> float:
        """Return the sum of one kind of device."""
        return sum(one.price_s for one in self.priced if one.job.device == device)


def _cost_by(
    rule: DecisionRule,
    scope: str,
    workloads: Sequence[Workload],
    table: CiTable,
    histories: Histories,
) -> _ScopeCost:
    """Return what a scope is expected to cost by a rule."""
    decision = decision_by(rule, "", Trigger(event=table.events[0]), table)
    filters = {
        "scope": (scope,),
        "cadence": decision.cadence,
        "environment": (decision.environment,),
    }
    priced: list[_PricedJob] = []
    unknown: list[CiJob] = []
    for row in workloads:
        if row.model == UNIT_MODEL or row.disabled_reason is not None or failing(row, filters):
            continue
        name = row.node_id
        gpus = 0 if row.platform == CPU_PLATFORM else row.gpus
        repeats = decision.num_repeats(row.n_repeat)
        job = CiJob(id=name, name=name, gpus=gpus, n_repeat=repeats)
        found = price_job(job, (name,), histories)
        if found is None:
            unknown.append(job)
        else:
            priced.append(found)
    return _ScopeCost(rule=rule, priced=tuple(priced), unknown=tuple(unknown))


def _finding(scope: str, budget: Budget, cost: _ScopeCost, file: Path) -> Finding | None:
    """Return an error for a scope that is too dear, a note for one that is not wholly known."""
    unknown = [job.name for job in cost.unknown if job.device == budget.device]
    mine = [one for one in cost.priced if one.job.device == budget.device]
    total_s = cost.total_s(budget.device)
    expected = device_time(total_s, budget.device)
    rest = f"{counted(len(unknown), 'row')} without history, not counted: {listed(unknown, 3)}"
    if total_s <= budget.seconds:
        if mine and not unknown:
            return None
        if not unknown:
            rest = "it has no such rows"
        message = f"scope {scope!r}: {expected} of its budget of {budget.text} expected; {rest}"
        return Finding(file=file, line=None, rule="budget", message=message, severity=Severity.NOTE)
    dearest = [
        f"{one.job.name} {device_time(one.price_s, budget.device)}"
        for one in sorted(mine, key=lambda one: (-one.price_s, one.job.name))
    ]
    message = (
        f"scope {scope!r} is expected to cost {expected} by rule {cost.rule.name!r}, its budget is "
        f"{budget.text}; the dearest: {listed(dearest, _MOST_DEAREST)}"
    )
    return Finding(
        file=file, line=None, rule="budget", message=f"{message}; {rest}" if unknown else message
    )

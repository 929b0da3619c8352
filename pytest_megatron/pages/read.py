"""Reads a finished run directory into the data of pages (effects: files, read only).

Paths in the files are not followed: where something lies follows from node ids and numbers, so
that a run may have moved, and an artifact that names other places leads nowhere. Pages of tests
alone load nothing of workloads.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice, zip_longest
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, TypeVar

from pytest_megatron.errors import GoldenError, MetricsError, RunError
from pytest_megatron.pages.chart import allowed_around
from pytest_megatron.pages.model import (
    GOOD,
    AttemptRow,
    Chart,
    Curve,
    CurveRole,
    FileLink,
    MetricFinding,
    PageItem,
    RunFacts,
    TestRow,
)
from pytest_megatron.runs.find import FoundRun, find_runs
from pytest_megatron.runs.layout import RUN_FILE, AttemptDirs, ItemDirs, PhaseDirs, item_dirs
from pytest_megatron.runs.record import (
    RecordedAttempt,
    RecordedBand,
    RecordedComparison,
    RecordedTest,
    RecordedTriage,
    RecordedWorkload,
    read_record,
    read_run,
)

if TYPE_CHECKING:
    from pytest_megatron.workloads.golden.model import Golden, MetricMap

_MOST_PHASES = 100
_LOSS = "lm loss"
_GANG_DIRECTORY = re.compile(r"(ranks(?:-[\w.-]+)?/attempt_\d+)/?$")
_MOST_LOGS = 16  # linked, of one test or attempt
_File = TypeVar("_File")


def open_runs(
    paths: Sequence[Path], workspace: Path
) -> tuple[list[tuple[FoundRun, RunReader]], list[RunError]]:
    """Return a reader of each run in some paths, and an error for each that cannot be read.

    Args:
        paths: Run directories, artifacts, folders of either.
        workspace: A directory for what artifacts hold.

    Raises:
        RunError: There is no run, or none can be read.
    """
    readers: list[tuple[FoundRun, RunReader]] = []
    damaged: list[RunError] = []
    for run in find_runs(paths, workspace, is_worth_showing, refused=damaged):
        try:
            readers.append((run, RunReader(run.directory, run.name)))
        except RunError as error:
            where = run.name if run.is_unpacked else run.directory
            damaged.append(RunError(f"{where}/{RUN_FILE}", error.problem))
    if not readers:
        raise damaged[0] if damaged else RunError("RUN", "there is none, expected a run directory")
    return readers, damaged


class RunReader:
    """One run directory.

    Attributes:
        directory: Which; named by the user, or unpacked from an artifact.
    """

    def __init__(self, directory: Path, name: str | None = None) -> None:
        """Read the `run.json` of a run.

        Raises:
            RunError: There is none, or it is damaged.
        """
        self.directory = directory
        self._run = read_run(directory)
        self._name = name or directory.resolve().name

    @property
    def facts(self) -> RunFacts:
        """Facts about the run, for the heads of pages."""
        run = self._run
        facts = {
            "commit": f"{run.commit}, with changes" if run.commit and run.is_dirty else run.commit,
            "image": run.image,
            "python": run.python,
            "driver": run.driver,
            "cpu": run.cpu,
            "GPUs": f"{len(run.gpus)} x {run.gpus[0]}" if run.gpus else None,
            "versions": ", ".join(f"{name} {one}" for name, one in run.versions.items()),
        }
        return RunFacts(
            name=self._name,
            started=run.started or "",
            arguments=run.arguments or (),
            facts=tuple((key, text) for key, text in facts.items() if text),
        )

    def items(self) -> Iterator[PageItem]:
        """Yield the workloads, one after the other: their curves are large."""
        for node_id, record in self._run.items.items():
            if isinstance(record, RecordedWorkload):
                yield self._item(node_id, record)

    def tests(self) -> tuple[dict[str, int], tuple[TestRow, ...]]:
        """Return how many distributed tests have which verdict, and all of them."""
        tests = {n: r for n, r in self._run.items.items() if isinstance(r, RecordedTest)}
        counts = Counter[str](record.verdict for record in tests.values())
        return dict(counts), tuple(self._test(n, r) for n, r in tests.items())

    def _test(self, node_id: str, record: RecordedTest) -> TestRow:
        """Return the row of a distributed test."""
        found = [_GANG_DIRECTORY.search(attempt.directory) for attempt in record.attempts]
        gangs = [] if record.verdict in GOOD else [match[1] for match in found if match is not None]
        logs = (link for gang in dict.fromkeys(gangs) for link in _rank_logs(self.directory, gang))
        return TestRow(node_id=node_id, record=record, links=tuple(islice(logs, _MOST_LOGS)))

    def _item(self, node_id: str, record: RecordedWorkload) -> PageItem:
        """Return what the page of a workload shows."""
        dirs = item_dirs(self.directory, node_id)
        notes: list[str] = []
        comparison = _record(dirs.comparison, RecordedComparison, notes) or RecordedComparison()
        triage = _record(dirs.triage, RecordedTriage, notes) or RecordedTriage()
        findings = tuple(_findings(comparison))
        attempts = tuple(
            _attempt(dirs, row, is_last=following is None or following.repeat != row.repeat)
            for row, following in zip_longest(record.attempts, record.attempts[1:])
        )
        charts = _charts(dirs, record, comparison, notes)
        shown = {chart.metric for chart in charts}
        return PageItem(
            node_id=node_id,
            directory=dirs.root.name,
            record=record,
            attempts=attempts,
            charts=charts,
            others=tuple(f for f in findings if f.record.metric not in shown),
            triage=tuple(_triage(triage)),
            links=_links(dirs.root, _ITEM_FILES),
            notes=tuple(notes),
        )


def _record(path: Path, model: type[_File], notes: list[str]) -> _File | None:
    """Return a file beside `run.json`; None where it is not there, or damaged."""
    if not path.is_file():
        return None
    try:
        return read_record(path, model)
    except RunError as error:
        notes.append(f"{path.name} is not shown: {error.problem}")
        return None


def _golden(dirs: ItemDirs, notes: list[str]) -> Golden | None:
    """Return the golden that the run kept, None if there is none to be read."""
    if not dirs.golden.is_file():
        return None
    from pytest_megatron.workloads.golden.store import read_golden  # noqa: PLC0415 - see above

    try:
        return read_golden(dirs.golden)
    except GoldenError as error:
        notes.append(f"the golden is not shown: {error.problem}")
        return None


def _findings(comparison: RecordedComparison) -> Iterator[MetricFinding]:
    """Yield the finding of each metric in each repeat."""
    for repeat in comparison.repeats:
        for record in repeat.comparisons:
            yield MetricFinding(repeat=repeat.repeat, against=repeat.against, record=record)


def _allowed(comparison: RecordedComparison) -> dict[str, RecordedBand]:
    """Return the band of each metric around its golden, the same for every repeat."""
    return {
        row.metric: row.allowed
        for repeat in comparison.repeats
        if repeat.against == "golden"
        for row in repeat.comparisons
        if row.allowed is not None
    }


def _curves(
    dirs: ItemDirs, attempts: Sequence[RecordedAttempt], notes: list[str]
) -> list[tuple[str, Curve]]:
    """Return (metric, curve) of every attempt, also of those that failed."""
    has_repeats = any(row.repeat != 1 for row in attempts)
    tried = Counter(row.repeat for row in attempts)
    found: list[tuple[str, Curve]] = []
    for row in attempts:
        repeat, number = row.repeat, row.attempt
        if not repeat or not number:
            continue
        parts = [f"repeat {repeat}"] if has_repeats else []
        parts += [f"attempt {number}"] if tried[repeat] > 1 else []
        name = ", ".join(parts) or "this run"
        role = CurveRole.FAILED if row.cause else CurveRole.RUN
        measured = list(_measured(dirs.attempt(repeat=repeat, attempt=number), notes))
        for phase, metrics in measured:
            label = name if phase is None else f"{name}, phase {phase}"
            found += [
                (metric, Curve(name=label, role=role, series=series, is_resumed=(phase or 1) > 1))
                for metric, series in metrics.items()
            ]
    return found


def _measured(dirs: AttemptDirs, notes: list[str]) -> Iterator[tuple[int | None, MetricMap]]:
    """Yield the metrics of an attempt: phase, metrics; the phase is None if there is only one."""
    if dirs.metrics.is_file():
        yield from ((None, metrics) for metrics in _read(dirs.metrics, notes))
        return
    phases = []
    for number in range(1, _MOST_PHASES):
        if not dirs.phase(number).root.is_dir():
            break
        phases += [(number, metrics) for metrics in _read_phase(dirs.phase(number), notes)]
    is_alone = not dirs.phase(2).root.is_dir()
    yield from ((None if is_alone else number, metrics) for number, metrics in phases)


def _read_phase(dirs: PhaseDirs, notes: list[str]) -> Iterator[MetricMap]:
    """Yield the metrics of a phase; one that failed may have no `metrics.json`."""
    from pytest_megatron.workloads.golden.collect import (  # noqa: PLC0415 - see above
        has_measured,
        read_measured,
    )

    if dirs.metrics.exists():
        yield from _read(dirs.metrics, notes)
    elif has_measured(dirs):
        try:
            yield read_measured(dirs).metrics
        except MetricsError as error:
            notes.append(_not_shown(Path(error.where), error))


def _read(path: Path, notes: list[str]) -> Iterator[MetricMap]:
    """Yield the metrics of a file, or note that it cannot be shown."""
    from pytest_megatron.workloads.golden.store import read_metrics  # noqa: PLC0415 - see above

    try:
        yield read_metrics(path).metrics
    except MetricsError as error:
        notes.append(_not_shown(path, error))


def _not_shown(path: Path, error: MetricsError) -> str:
    return f"{'/'.join(path.parts[-4:])} is not shown: {error.problem}"


def _charts(
    dirs: ItemDirs, record: RecordedWorkload, comparison: RecordedComparison, notes: list[str]
) -> tuple[Chart, ...]:
    """Return a chart for each metric that a run measured or a comparison was about."""
    golden = _golden(dirs, notes)
    curves = _curves(dirs, record.attempts, notes)
    findings, allowed = tuple(_findings(comparison)), _allowed(comparison)
    expected = {} if golden is None else golden.metrics
    names = dict.fromkeys((*expected, *(metric for metric, _ in curves)))
    charts = []
    for metric in names:
        mine = tuple(f for f in findings if f.record.metric == metric)
        shown = [curve for name, curve in curves if name == metric]
        band = None
        if golden is not None and metric in expected:
            shown.insert(0, Curve(name="golden", role=CurveRole.GOLDEN, series=expected[metric]))
            band = allowed_around(expected[metric], allowed.get(metric, RecordedBand()))
        charts.append(Chart(metric=metric, curves=tuple(shown), allowed=band, findings=mine))
    order = {False: 0, True: 1, None: 2}
    return tuple(sorted(charts, key=lambda c: (order[c.passed], c.metric != _LOSS, c.metric)))


def _attempt(dirs: ItemDirs, row: RecordedAttempt, *, is_last: bool) -> AttemptRow:
    """Return the row of an attempt, with links to its logs."""
    root = dirs.attempt(repeat=row.repeat or 1, attempt=row.attempt or 1).root
    return AttemptRow(
        record=row,
        is_run_again=not is_last,
        links=tuple(_logs(dirs.root, root, row.root_rank or 0)),
    )


def _logs(item: Path, attempt: Path, rank: int) -> Iterator[FileLink]:
    """Yield links to the logs of an attempt, of one rank first."""
    prefix = attempt.relative_to(item).as_posix()
    for number in range(1, _MOST_PHASES):
        phase = f"{prefix}/phase_{number}"
        if not (item / phase).is_dir():
            break
        start = f"phase {number}: " if number > 1 else ""
        logs = list(islice(_rank_logs(item, f"{phase}/logs", rank), _MOST_LOGS))
        if (item / phase / "launcher.log").exists():
            logs.append(FileLink(text="launcher", path=f"{phase}/launcher.log"))
        for link in logs:
            yield FileLink(text=f"{start}{link.text}", path=link.path)
            start = ""
    if (attempt / "plan.json").is_file():
        yield FileLink(text="plan", path=f"{prefix}/plan.json")


def _rank_logs(root: Path, directory: str, first: int = 0) -> Iterator[FileLink]:
    """Yield the logs of ranks in a directory that hold anything, errors before other output."""
    ranks = sorted(int(p.name) for p in (root / directory).glob("[0-9]*") if p.name.isdecimal())
    for name in ("stderr", "stdout"):
        for rank in sorted(ranks, key=lambda rank: rank != first):
            path = f"{directory}/{rank}/{name}.log"
            if (root / path).is_file() and (root / path).stat().st_size:
                yield FileLink(text=f"rank {rank} {name}", path=path)


def _links(directory: Path, names: tuple[str, ...]) -> tuple[FileLink, ...]:
    return tuple(FileLink(text=n, path=n) for n in names if (directory / n).is_file())


def _triage(triage: RecordedTriage) -> Iterator[str]:
    """Yield what triage says of each attempt that failed."""
    for row in triage.attempts:
        lines = [text for text in (row.text, row.reason, row.advice) if text]
        lines += [f"next: {row.next}"] if row.next else []
        if lines:
            yield f"{row.attempt}: " + "\n  ".join(lines)


_ITEM_FILES = ("comparison.json", "triage.json", "golden.json")
_NAMES = frozenset((*_ITEM_FILES, "metrics.json", "metrics.jsonl"))


def is_worth_showing(path: PurePath) -> bool:
    """Return whether a member of an artifact is needed for pages."""
    return path.name in _NAMES or "tfevents" in path.name

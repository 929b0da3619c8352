"""Reads a finished run directory into what pages show (effects: files, read only).

Paths in the files are not followed: where something lies follows from node ids and numbers, so
that a run may have moved, and an artifact that names other places leads nowhere.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from pytest_megatron.errors import GoldenError, MetricsError, ReportError
from pytest_megatron.golden.compare.result import RELATIVE, ComparisonRule, Layer
from pytest_megatron.golden.model import MetricMap
from pytest_megatron.golden.provenance import Golden
from pytest_megatron.golden.store import read_golden, read_metrics
from pytest_megatron.pages.chart import allowed_around
from pytest_megatron.pages.model import (
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
from pytest_megatron.runs.archives import is_archive, unpack
from pytest_megatron.runs.fields import Fields, read_fields, read_if_there
from pytest_megatron.runs.find import runs_below
from pytest_megatron.runs.layout import RUN_FILE, AttemptDirs, ItemDirs, PhaseDirs, item_dirs

_MOST_PHASES = 100
_LOSS = "lm loss"
_GANG_DIRECTORY = re.compile(r"(ranks(?:-[\w.-]+)?/attempt_\d+)/?$")
_SEE = re.compile(r"; see \S+$")
_FACTS = ("commit", "image", "python", "driver", "cpu")


class RunReader:
    """One run directory.

    Attributes:
        directory: Which; named by the user, or unpacked from an artifact.
    """

    def __init__(self, directory: Path, name: str | None = None) -> None:
        """Read its `run.json`.

        Raises:
            ReportError: There is none, or it is damaged.
        """
        self.directory = directory
        if not (directory / RUN_FILE).is_file():
            raise ReportError(
                str(directory), f"holds no {RUN_FILE}; expected a run directory or an artifact"
            )
        self._run = read_fields(directory / RUN_FILE)
        self._items = self._run.inner("items")
        self._name = name or directory.resolve().name

    @property
    def facts(self) -> RunFacts:
        """What ran, where, with what."""
        run = self._run
        facts = [(key, run.text(key)) for key in _FACTS if run.text(key)]
        if facts and facts[0][0] == "commit" and run.flag("is_dirty"):
            facts[0] = ("commit", f"{facts[0][1]}, with changes")
        names = [gpu.text("name") for gpu in run.rows("gpus")]
        facts += [("GPUs", f"{len(names)} x {names[0]}")] if names else []
        versions = run.inner("versions").values
        shown = ", ".join(f"{name} {version}" for name, version in versions.items())
        facts += [("versions", shown)] if shown else []
        return RunFacts(
            name=self._name,
            started=run.text("started"),
            arguments=run.texts("arguments"),
            facts=tuple(facts),
        )

    def items(self) -> Iterator[PageItem]:
        """Yield the workloads, one after the other: their curves are large."""
        for node_id, record in self._records():
            if record.whole("world_size") is None:
                yield self._item(node_id, record)

    def tests(self) -> tuple[dict[str, int], tuple[TestRow, ...]]:
        """Return how many distributed tests have which verdict, and those that did not pass."""
        counts: dict[str, int] = {}
        rows: list[TestRow] = []
        for node_id, record in self._records():
            size = record.whole("world_size")
            if size is None:
                continue
            verdict = record.text("verdict", "unknown")
            counts[verdict] = counts.get(verdict, 0) + 1
            if verdict not in ("passed", "skipped"):
                rows.append(self._test(node_id, record, size))
        return counts, tuple(rows)

    def _records(self) -> Iterator[tuple[str, Fields]]:
        for node_id, record in self._items.values.items():
            if isinstance(record, dict):
                yield node_id, Fields(record)

    def _test(self, node_id: str, record: Fields, size: int) -> TestRow:
        attempts = record.rows("attempts")
        found = [_GANG_DIRECTORY.search(attempt.text("directory")) for attempt in attempts]
        logs = dict.fromkeys(match[1] for match in found if match is not None)
        ranks = record.inner("ranks")
        return TestRow(
            node_id=node_id,
            verdict=record.text("verdict", "unknown"),
            problem=record.text("problem") or _reruns(attempts),
            world_size=size,
            duration_s=record.number("duration_s") or 0.0,
            num_attempts=len(attempts),
            ranks=tuple((rank, ranks.text(rank)) for rank in ranks.values),
            links=tuple(
                FileLink(text=path, path=f"{path}/")
                for path in logs
                if (self.directory / path).is_dir()
            ),
        )

    def _item(self, node_id: str, record: Fields) -> PageItem:
        dirs = item_dirs(self.directory, node_id)
        comparison = read_if_there(dirs.comparison)
        findings = tuple(_findings(comparison))
        notes: list[str] = []
        golden = _golden(dirs, notes)
        attempts = tuple(_attempt(dirs, row) for row in record.rows("attempts"))
        curves = _curves(dirs, record.rows("attempts"), notes)
        charts = tuple(_charts(golden, curves, findings, _allowed(comparison)))
        shown = {chart.metric for chart in charts}
        held = record.inner("quarantine")
        return PageItem(
            node_id=node_id,
            directory=dirs.root.name,
            verdict=record.text("verdict", "unknown"),
            platform=record.text("platform"),
            problem=record.text("problem") or None,
            summary=record.text("summary"),
            duration_s=record.number("duration_s"),
            attempts=attempts,
            charts=charts,
            others=tuple(f for f in findings if f.metric not in shown),
            triage=_triage(dirs),
            links=_links(dirs.root, ("comparison.json", "triage.json", "golden.json")),
            notes=tuple(notes),
            quarantine=held.text("reason", "no reason given") if held.flag("holds") else "",
        )


def _golden(dirs: ItemDirs, notes: list[str]) -> Golden | None:
    if not dirs.golden.is_file():
        return None
    try:
        return read_golden(dirs.golden)
    except GoldenError as error:
        notes.append(f"the golden is not shown: {error.problem}")
        return None


def _findings(comparison: Fields) -> Iterator[MetricFinding]:
    for repeat in comparison.rows("repeats"):
        for row in repeat.rows("comparisons"):
            yield MetricFinding(
                metric=row.text("metric"),
                repeat=repeat.whole("repeat") or 1,
                against=repeat.text("against", "golden"),
                passed=row.flag("passed"),
                rule=row.text("rule"),
                first_step=None if row.flag("passed") else row.whole("first_step"),
                text=row.text("text"),
                golden_path=row.text("golden_path"),
                largest=row.number("largest_relative"),
                layers=tuple(_layers(row)),
            )


def _layers(comparison: Fields) -> Iterator[tuple[bool, str]]:
    """Yield what the layers of a comparison say, those that this version knows."""
    rules = {rule.value: rule for rule in ComparisonRule}
    for row in comparison.rows("layers"):
        rule = rules.get(row.text("layer"))
        if rule is not None:
            layer = Layer(
                rule=rule,
                passed=row.flag("passed"),
                measured=row.number("measured"),
                limit=row.number("limit"),
                unit=row.text("unit", RELATIVE),
                place=row.text("place") or None,
            )
            yield layer.passed, layer.text


def _allowed(comparison: Fields) -> dict[str, Fields]:
    """Return what each metric was allowed around its golden, the same for every repeat."""
    return {
        row.text("metric"): row.inner("allowed")
        for repeat in comparison.rows("repeats")
        if repeat.text("against", "golden") == "golden"
        for row in repeat.rows("comparisons")
        if row.inner("allowed").values
    }


def _curves(dirs: ItemDirs, attempts: list[Fields], notes: list[str]) -> list[tuple[str, Curve]]:
    """Return (metric, curve) of every attempt, also of those that failed."""
    has_repeats = any(row.whole("repeat") != 1 for row in attempts)
    tried = Counter(row.whole("repeat") for row in attempts)
    found: list[tuple[str, Curve]] = []
    for row in attempts:
        repeat, number = row.whole("repeat"), row.whole("attempt")
        if not repeat or not number:
            continue
        parts = [f"repeat {repeat}"] if has_repeats else []
        parts += [f"attempt {number}"] if tried[repeat] > 1 else []
        name = ", ".join(parts) or "this run"
        role = CurveRole.FAILED if row.text("cause") else CurveRole.RUN
        measured = list(_measured(dirs.attempt(repeat=repeat, attempt=number), notes))
        for phase, metrics in measured:
            label = name if phase is None else f"{name}, phase {phase}"
            found += [
                (metric, Curve(name=label, role=role, series=series, is_resumed=(phase or 1) > 1))
                for metric, series in metrics.items()
            ]
    return found


def _measured(dirs: AttemptDirs, notes: list[str]) -> Iterator[tuple[int | None, MetricMap]]:
    """Yield what an attempt measured: phase, metrics; the phase is None where there is one only."""
    if dirs.metrics.is_file():
        yield from ((None, metrics) for metrics in _read(dirs.metrics, notes))
        return
    phases = []
    for number in range(1, _MOST_PHASES):
        if not dirs.phase(number).root.is_dir():
            break
        phases += [(number, metrics) for metrics in _read(_source(dirs.phase(number)), notes)]
    is_alone = not dirs.phase(2).root.is_dir()
    yield from ((None if is_alone else number, metrics) for number, metrics in phases)


def _source(dirs: PhaseDirs) -> Path | None:
    """Return what to read of a phase; one that failed may have no `metrics.json`."""
    for path in (dirs.metrics, dirs.metrics_lines):
        if path.exists():
            return path
    is_empty = not dirs.tensorboard.is_dir() or not any(dirs.tensorboard.iterdir())
    return None if is_empty else dirs.tensorboard


def _read(path: Path | None, notes: list[str]) -> Iterator[MetricMap]:
    if path is None:
        return
    try:
        yield read_metrics(path).metrics
    except MetricsError as error:
        where = "/".join(path.parts[-4:])
        notes.append(f"{where} is not shown: {error.problem}")


def _charts(
    golden: Golden | None,
    curves: list[tuple[str, Curve]],
    findings: tuple[MetricFinding, ...],
    allowed: Mapping[str, Fields],
) -> Iterator[Chart]:
    """Yield a chart for each metric that a run measured or a comparison was about."""
    expected = {} if golden is None else golden.metrics
    names = dict.fromkeys((*expected, *(metric for metric, _ in curves)))
    charts = []
    for metric in names:
        mine = tuple(f for f in findings if f.metric == metric)
        shown = [curve for name, curve in curves if name == metric]
        band = None
        if golden is not None and metric in expected:
            shown.insert(0, Curve(name="golden", role=CurveRole.GOLDEN, series=expected[metric]))
            band = allowed_around(expected[metric], allowed.get(metric, Fields({})))
        charts.append(Chart(metric=metric, curves=tuple(shown), allowed=band, findings=mine))
    order = {False: 0, True: 1, None: 2}
    yield from sorted(charts, key=lambda c: (order[c.passed], c.metric != _LOSS, c.metric))


def _attempt(dirs: ItemDirs, row: Fields) -> AttemptRow:
    repeat, number = row.whole("repeat") or 1, row.whole("attempt") or 1
    root = dirs.attempt(repeat=repeat, attempt=number).root
    rank = row.whole("root_rank")
    return AttemptRow(
        name=f"repeat {repeat}, attempt {number}",
        cause=_SEE.sub("", row.text("cause")) or None,
        signature=row.text("signature") or None,
        is_transient=row.flag("is_transient"),
        root_rank=rank,
        duration_s=row.number("duration_s") or 0.0,
        links=tuple(_logs(dirs.root, root, rank or 0)),
    )


def _logs(item: Path, attempt: Path, rank: int) -> Iterator[FileLink]:
    prefix = attempt.relative_to(item).as_posix()
    for number in range(1, _MOST_PHASES):
        phase = f"phase_{number}"
        if not (attempt / phase).is_dir():
            break
        start = f"phase {number}: " if number > 1 else ""
        for text, path in (
            (f"rank {rank} stderr", f"{phase}/logs/{rank}/stderr.log"),
            ("stdout", f"{phase}/logs/{rank}/stdout.log"),
            ("launcher", f"{phase}/launcher.log"),
            ("all ranks", f"{phase}/logs/"),
        ):
            if (attempt / path).exists():
                yield FileLink(text=f"{start}{text}", path=f"{prefix}/{path}")
                start = ""
    if (attempt / "plan.json").is_file():
        yield FileLink(text="plan", path=f"{prefix}/plan.json")


def _links(directory: Path, names: tuple[str, ...]) -> tuple[FileLink, ...]:
    return tuple(FileLink(text=n, path=n) for n in names if (directory / n).is_file())


def _triage(dirs: ItemDirs) -> tuple[str, ...]:
    found = []
    for row in read_if_there(dirs.triage).rows("attempts"):
        said = [row.text(key) for key in ("text", "reason", "advice") if row.text(key)]
        said += [f"next: {row.text('next')}"] if row.text("next") else []
        if said:
            found.append(f"{row.text('attempt')}: " + "\n  ".join(said))
    return tuple(found)


def _reruns(attempts: list[Fields]) -> str:
    causes = [a.text("signature") for a in attempts if a.flag("is_transient")]
    return f"passed at rerun {len(causes)}, after {', '.join(causes)}" if causes else ""


_NAMES = frozenset(
    (RUN_FILE, "comparison.json", "triage.json", "golden.json", "metrics.json", "metrics.jsonl")
)
_MOST_DEPTH = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A run to show.

    Attributes:
        is_unpacked: Whether it lies in a directory of ours that goes away.
    """

    reader: RunReader
    is_unpacked: bool


def find_runs(paths: Sequence[Path], workspace: Path) -> list[Source]:
    """Return the runs in what was named, in that order.

    Args:
        paths: Run directories, artifacts (zip, tar), folders of either.
        workspace: An empty directory of our own, for what has to be unpacked.

    Raises:
        ReportError: One of them is not there, or holds no run.
        TriageError: An archive cannot be unpacked, or holds what no run leaves.
    """
    found: list[Source] = []
    for number, path in enumerate(paths):
        if not path.exists():
            raise ReportError(str(path), "no such file or directory, expected a run or an artifact")
        mine = list(_in(path, workspace / str(number)))
        if not mine:
            raise ReportError(
                str(path), f"holds no {RUN_FILE}; expected a run directory or an artifact"
            )
        found += mine
    return found


def _in(path: Path, workspace: Path) -> Iterator[Source]:
    if path.is_file():
        if not is_archive(path):
            raise ReportError(str(path), "is no run; expected a run directory, a zip or a tar")
        yield from _unpacked(path, workspace)
        return
    for directory in runs_below(path, depth=_MOST_DEPTH):
        yield Source(reader=RunReader(directory), is_unpacked=False)
    if (path / RUN_FILE).is_file():
        return
    for number, inner in enumerate(sorted(p for p in path.iterdir() if p.is_file())):
        if is_archive(inner):
            yield from _unpacked(inner, workspace / str(number))


def _unpacked(path: Path, workspace: Path) -> Iterator[Source]:
    workspace.mkdir(parents=True)
    unpack(path, workspace, is_wanted=_is_wanted)
    name = path.name.split(".")[0]
    for directory in runs_below(workspace, depth=_MOST_DEPTH):
        below = directory.relative_to(workspace).as_posix()
        shown = name if below == "." else f"{name}/{below}"
        yield Source(reader=RunReader(directory, shown), is_unpacked=True)


def _is_wanted(path: PurePath) -> bool:
    return path.name in _NAMES or "tfevents" in path.name

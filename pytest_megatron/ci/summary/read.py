"""Reads the plan, and the files of each job of CI: `job.json`, run directories, JUnit XML.

A job without results never counts as passed.
"""

from __future__ import annotations

import glob
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pytest_megatron.base.files import read_json
from pytest_megatron.base.schema import SchemaError, parse, validate
from pytest_megatron.ci.jobs import PlanFile
from pytest_megatron.ci.summary.junit import JUnitCase, address, read_junit
from pytest_megatron.ci.summary.model import (
    FILE_NAME,
    LOG_NAME,
    CiJobRecord,
    ItemCause,
    JobItem,
    JobRun,
)
from pytest_megatron.errors import CiError, RunError, TriageError
from pytest_megatron.runs.archives import is_archive
from pytest_megatron.runs.find import directories_below
from pytest_megatron.runs.headline import one_process_problem
from pytest_megatron.runs.layout import RUN_FILE, TRIAGE_FILE
from pytest_megatron.runs.record import (
    OptionValue,
    RecordedAttempt,
    RecordedEvidence,
    RecordedExecution,
    RecordedItem,
    RecordedPlan,
    RecordedTest,
    RecordedTriage,
    RecordedWorkload,
    Result,
    read_if_whole,
    read_record,
)
from pytest_megatron.runs.record import read_run as read_run_file
from pytest_megatron.triage.api import triage
from pytest_megatron.triage.find import SKIPPED_DIRECTORIES

_RANK = re.compile(r"^(?:\[rank (\d+)\]|rank (\d+) of )")
_TELLING = re.compile(r"^Fatal Python error|^(?:\w+\.)*\w*(?:Error|Exception|Exit)\b|Traceback \(")
_LINE = re.compile(r":([1-9]\d{0,8})$")
_TAIL_BYTES = 1 << 16


def cause_of_workload(record: RecordedWorkload, run_dir: Path, shown: str) -> ItemCause | None:
    """Return why a workload did not pass; None if it did.

    Args:
        record: The one in `run.json`.
        run_dir: The run directory here.
        shown: How a user would name that directory.
    """
    bad = [attempt for attempt in record.attempts if attempt.cause]
    if record.problem is None and not bad:
        return None
    last = bad[-1] if bad else RecordedAttempt()
    triage = _triage(record, run_dir)
    evidence = triage.evidence[0] if triage.evidence else None
    shows = (line.strip() for line in (record.problem or "").splitlines() if line[:1] == " ")
    return ItemCause(
        text=record.headline or last.cause or "",
        rank=last.root_rank,
        place=_path_in_artifact(evidence, record, run_dir, shown),
        line=next(shows, None) if evidence is None else evidence.text,
        advice=record.advice,
        is_transient=last.is_transient,
        fingerprint=last.fingerprint or "",
    )


def cause_of_test(
    record: RecordedTest, case: JUnitCase | None, run_dir: Path, shown: str
) -> ItemCause | None:
    """Return why a distributed test did not pass; None if it did."""
    problem = record.problem
    if problem is None:
        return None
    found = _RANK.match(problem)
    rank = None if found is None else int(found[1] or found[2])
    place, line = (None if case is None else case.location), None
    last = record.attempts[-1] if record.attempts else RecordedExecution()
    has_log = last.end != "done"  # else the rank's log is of its other tests
    if place is None and rank is not None and last.directory and has_log:
        directory = Path(*Path(last.directory).parts[-2:], str(rank))
        log, stacks = directory / "stderr.log", directory / "stacks.txt"
        if is_within(run_dir / log, run_dir) and (run_dir / log).stat().st_size:
            number, line = telling_line(run_dir / log)
            place = f"{shown}/{log}" + (f":{number}" if number else "")
        elif is_within(run_dir / stacks, run_dir) and (run_dir / stacks).stat().st_size:
            place = f"{shown}/{stacks}"
    return ItemCause(text=problem, rank=rank, place=place, line=line)


def cause_of_case(case: JUnitCase) -> ItemCause | None:
    """Return why a test that ran on no gang did not pass; None if it did."""
    if case.outcome not in ("failed", "broken"):
        return None
    return ItemCause(text=case.message or case.text or case.outcome, place=case.location)


def _triage(record: RecordedWorkload, run_dir: Path) -> RecordedTriage:
    """Return the diagnosis that a workload left in its run."""
    file = run_dir / Path(record.directory or "").name / TRIAGE_FILE
    found = read_if_whole(file, RecordedTriage) if is_within(file, run_dir) else None
    return found or RecordedTriage()


def is_within(path: Path, directory: Path) -> bool:
    """Return true if a file exists and lies in a directory, links resolved."""
    return path.is_file() and path.resolve().is_relative_to(directory.resolve())


def _path_in_artifact(
    evidence: RecordedEvidence | None, record: RecordedWorkload, run_dir: Path, shown: str
) -> str | None:
    """Return where the cause of a failed workload can be read: a file of the artifact, `:line`.

    The record has paths of the machine that ran it; only what follows the item's directory counts.
    Without evidence it is the item's comparison with its golden, None if there was none.

    Args:
        evidence: The line of a log that shows the cause, if one was found.
        record: The workload in `run.json`.
        run_dir: The run directory within the artifact, on this machine.
        shown: How `run_dir` is shown to the reader.
    """
    if not record.directory:
        return None
    item = Path(record.directory).name
    if evidence is None:
        is_compared = (run_dir / item / "comparison.json").is_file()
        return f"{shown}/{item}/comparison.json" if is_compared else None
    _, found, rest = evidence.file.partition(f"{item}/")
    number = f":{evidence.line}" if evidence.line else ""
    return (f"{shown}/{item}/{rest}" if found else evidence.file) + number


def telling_line(log: Path) -> tuple[int | None, str | None]:
    """Return number and text of the line of a log that shows the failure, if one does."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            start = file.tell()
            lines = file.read(_TAIL_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return None, None
    numbers = [i for i, line in enumerate(lines) if _TELLING.match(line)]
    numbers = numbers or [i for i, line in enumerate(lines) if line.strip()][-1:]
    if not numbers:
        return None, None
    number = numbers[-1]
    return (number + 1 if start == 0 else None), lines[number]


_PLAN = "plan.json"
_SUMMARY = "summary.json"


def read_plan(path: Path) -> PlanFile:
    """Read what `pytest-megatron plan --format json` wrote; a directory has it as `plan.json`.

    Raises:
        CiError: It cannot be read, or is no plan.
    """
    file = path / _PLAN if path.is_dir() else path
    try:
        return validate(PlanFile, read_json(file))
    except SchemaError as error:
        problem = f"{error.problems[0].in_output}; expected what 'plan --format json' prints"
        raise CiError(str(file), problem) from None
    except (OSError, ValueError) as error:
        raise CiError(str(file), f"cannot be read as a plan: {error}") from error


@dataclass(frozen=True, kw_only=True)
class _JobResult:
    """An entry of GitHub's `toJSON(needs)`."""

    result: str


_RESULTS = dict[str, str | _JobResult]


def read_results(text: str) -> dict[str, str]:
    """Read GitHub's `toJSON(needs)`: job of the workflow -> how it ended.

    Raises:
        CiError: It is something else.
    """
    try:
        found = parse(_RESULTS, text)
    except SchemaError as error:
        raise CiError("--results", f"{error}; give toJSON(needs)") from None
    return {n: one if isinstance(one, str) else one.result for n, one in found.items()}


_NO_ITEMS = "ran no workload and nothing on a gang, and left no JUnit XML of other tests"
_DEPTH = 3  # directories from a job's to its run directories
_EXITS = {
    2: "was interrupted",
    3: "had an internal error",
    4: "refused its arguments",
    5: "found no test to run",
}


@dataclass(slots=True)
class _JobCollector:
    """Items and problems of one job so far."""

    shown: str
    root: Path
    items: dict[str, JobItem] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    commits: set[str] = field(default_factory=set)
    has_junit: bool = False
    cases: dict[tuple[str, str], JUnitCase] = field(default_factory=dict)


def is_job(directory: Path) -> bool:
    """Return true for the directory of one job, or of one run."""
    names = (FILE_NAME, RUN_FILE)
    return any((directory / name).is_file() for name in names) or bool(_junit_files(directory))


def read_run(root: Path, shown: str) -> JobRun:
    """Read the files of one job.

    Args:
        root: Directory of the artifact.
        shown: How a user would name it.
    """
    book = _JobCollector(shown=shown, root=root)
    record = _job_record(book)
    name = record.job if record is not None else Path(shown).name
    directories = list(directories_below(root, depth=_DEPTH, skipped=SKIPPED_DIRECTORIES))
    for directory in directories:
        for file in _junit_files(directory):
            try:
                _note_cases(book, read_junit(file))
            except CiError as error:
                book.problems.append(f"{_show(book, file)}: {error.problem}")
    run_dirs = [d for d in directories if is_within(d / RUN_FILE, root)]
    for run_dir in run_dirs:
        _read_run_dir(book, run_dir, name)
    _add_cases(book, name)
    if not run_dirs and (record is not None or not book.has_junit):
        book.problems.append(_nothing(root))
    elif not book.items and not book.problems:
        book.problems.append("ran no test" if book.has_junit else _NO_ITEMS)
    return JobRun(
        name=name,
        artifact=shown,
        record=record,
        items=tuple(book.items.values()),
        problems=tuple(book.problems),
        commits=frozenset(book.commits),
        has_run_file=bool(run_dirs),
    )


def _job_record(collector: _JobCollector) -> CiJobRecord | None:
    """Return the `job.json` of an artifact, None if it has none that can be read."""
    file = collector.root / FILE_NAME
    if not is_within(file, collector.root):
        return None
    try:
        record = read_record(file, CiJobRecord)
    except RunError as error:
        collector.problems.append(f"{FILE_NAME}: {error.problem}")
        return None
    if record.commit is not None:
        collector.commits.add(record.commit)
    return record


def _junit_files(directory: Path) -> list[Path]:
    """Return the files that may be JUnit XML, by their names."""
    found = sorted(directory.glob("*.xml")) if directory.is_dir() else []
    return [f for f in found if "coverage" not in f.name and f.is_file() and not f.is_symlink()]


def _show(collector: _JobCollector, path: Path) -> str:
    """Return a path as the summary shows it, below the artifact's name."""
    where = path.relative_to(collector.root).as_posix()
    return collector.shown if where == "." else f"{collector.shown}/{where}"


def _note_cases(collector: _JobCollector, cases: Iterable[JUnitCase]) -> None:
    """Note a case for each item: one that went wrong, if any did."""
    collector.has_junit = True
    for case in cases:
        key = (case.classname, case.name)
        if key not in collector.cases or collector.cases[key].outcome == "passed":
            collector.cases[key] = case


def _read_run_dir(collector: _JobCollector, run_dir: Path, job: str) -> None:
    """Take the items of one `run.json`, and the problems of the run as a whole."""
    shown = _show(collector, run_dir)
    try:
        run = read_run_file(run_dir)
    except RunError as error:
        what = "is not whole, or is no record of a run"
        collector.problems.append(f"{shown}/{RUN_FILE}: {what}: {error.problem}")
        return
    if run.commit is not None:
        collector.commits.add(run.commit)
    for node_id, record in run.items.items():
        case = collector.cases.get(address(node_id))
        item = _item(node_id, record, case, (run_dir, shown), job)
        if isinstance(record, RecordedWorkload):
            plan = _plan_of(record, run_dir)
            line = _LINE.search(plan.recipe or "") if plan is not None else None
            item = replace(
                _as_judged(item, record, run.options),
                line=None if line is None else int(line[1]),
            )
        collector.items[node_id] = item
    if run.on_one_process:
        collector.problems.append(one_process_problem(run.on_one_process))
    if (problem := _unfinished(run, run_dir, collector)) is not None:
        collector.problems.append(problem)


def _item(
    node_id: str,
    record: RecordedItem,
    case: JUnitCase | None,
    place: tuple[Path, str],
    job: str,
) -> JobItem:
    """Return an item of a job from its record and its JUnit case."""
    if isinstance(record, RecordedTest):
        cause = cause_of_test(record, case, *place)
    else:
        cause = cause_of_workload(record, *place)
    return JobItem(
        node_id=node_id,
        job=job,
        verdict=record.verdict,
        duration_s=record.duration_s or 0.0,
        num_attempts=len(record.attempts),
        is_held=record.is_held,
        causes=record.causes,
        cause=cause,
        reproduce=_reproduce(place[1], node_id),
        gpu_s=_gpu_seconds(record),
    )


def _gpu_seconds(record: RecordedItem) -> float:
    """Return GPUs times seconds of all attempts."""
    num_gpus = (record.num_devices or 0) if record.is_on_gpus else 0
    return num_gpus * sum(attempt.duration_s for attempt in record.attempts)


def _plan_of(record: RecordedWorkload, run_dir: Path) -> RecordedPlan | None:
    """Return the plan of the first attempt that has one."""
    name = Path(record.directory or "").name
    files = (
        sorted(run_dir.glob(f"{glob.escape(name)}/repeat_*/attempt_*/plan.json")) if name else []
    )
    plans = (read_if_whole(f, RecordedPlan) for f in files if is_within(f, run_dir))
    return next((plan for plan in plans if plan is not None), None)


def _as_judged(
    item: JobItem, record: RecordedWorkload, options: Mapping[str, OptionValue]
) -> JobItem:
    """Return a workload's item with how often and how strictly it ran."""
    return replace(
        item,
        num_repeats=len({row.repeat for row in record.attempts if row.cause is None}),
        is_compared=record.compared,
        is_lightweight=options.get("lightweight") is True,
        policy=record.policy if record.compared else None,
    )


def _reproduce(shown: str, node_id: str) -> str:
    """Return the command that shows it again, from the run directory."""
    return shlex.join(["pytest-megatron", "repro", shown, node_id])


def _unfinished(run: Result, run_dir: Path, collector: _JobCollector) -> str | None:
    """Return the problem with the end of a run; None if its items explain the exit code."""
    code = run.exit_code
    if run.ended is None or code is None:
        running = _running(run, run_dir)
        during = f" during {running}" if running else ""
        last = run.updated
        return f"never finished: it was killed{during}; the last thing that it wrote is of {last}"
    if code in _EXITS:
        return f"pytest {_EXITS[code]} (exit code {code})"
    has_bad = any(item.is_bad for item in collector.items.values())
    has_bad = has_bad or any(c.outcome in ("failed", "broken") for c in collector.cases.values())
    if code and not (has_bad or run.on_one_process):
        return f"pytest ended with exit code {code}, and no item says why; read the job's log"
    return None


def _running(run: Result, run_dir: Path) -> str | None:
    """Return the workload that has a plan and no record: it was running when the run was killed."""
    files = sorted(run_dir.glob("*/repeat_*/attempt_*/plan.json"))
    plans = (read_if_whole(file, RecordedPlan) for file in files)
    return next((p.node_id for p in plans if p is not None and p.node_id not in run.items), None)


def _add_cases(collector: _JobCollector, job: str) -> None:
    """Add tests that only JUnit XML has, and errors that came after a record was made."""
    known = {address(node_id): node_id for node_id in collector.items}
    for key, case in collector.cases.items():
        node_id = known.get(key)
        cause = cause_of_case(case)
        if node_id is not None:  # an error that came after its record was made
            item = collector.items[node_id]
            if cause is not None and item.verdict in ("passed", "flaky"):
                collector.items[node_id] = replace(item, verdict=case.outcome, cause=cause)
        else:
            collector.items[case.node_id] = JobItem(
                node_id=case.node_id,
                job=job,
                verdict=case.outcome,
                duration_s=case.duration_s,
                cause=cause,
                reproduce=shlex.join(["pytest", case.node_id]),
            )


def _nothing(root: Path) -> str:
    """Return the problem of a job without results, with the cause if its logs have it."""
    text = "left no run.json: it was killed early, or pytest did not start"
    try:
        found = triage([root])
    except TriageError:
        return text
    if found.groups:
        return f"{text}; {found.groups[0].first.text}"
    _, line = telling_line(root / LOG_NAME)
    return f"{text}; the last line of {LOG_NAME}: {line}" if line else text


_FOLDER_DEPTH = 4  # directories from what is named to a job's


def read_jobs(paths: Sequence[Path], *, is_empty_allowed: bool = False) -> list[JobRun]:
    """Read every job below some paths, in the order given and by name.

    Args:
        paths: Run directories, directories of artifacts, or folders of them.
        is_empty_allowed: Whether a folder may hold nothing: a plan lists the missing jobs.

    Raises:
        CiError: A path is not there, or no job is.
    """
    found: list[JobRun] = []
    for path in paths:
        if not path.is_dir():
            problem = "is no directory, expected a run or an artifact, unpacked"
            raise CiError(str(path), problem if path.exists() else "no such file or directory")
        real = path.resolve() if path.is_symlink() else path  # such as runs/latest
        here = list(_in(real, str(path), _FOLDER_DEPTH))
        if not here and not is_empty_allowed:
            raise CiError(
                str(path), "holds no run, expected run.json, job.json, JUnit XML or artifacts"
            )
        found += here
    return found


def _in(path: Path, shown: str, depth: int) -> Iterator[JobRun]:
    """Yield the jobs in a directory: of one job, or a folder of them."""
    if path.is_symlink() or (path / _SUMMARY).is_file():
        return  # a link may lead anywhere; a summary's own artifact is no job's
    if path.is_file():
        if is_archive(path):
            yield _unread(path, shown, "is an archive; unpack it, as gh run download does")
    elif is_job(path):
        yield read_run(path, shown)
    elif depth:
        found = [
            run
            for child in sorted(path.iterdir())
            for run in _in(child, f"{shown}/{child.name}", depth - 1)
        ]
        yield from found
        if not found and path.name.startswith("logs-"):
            yield _unread(path, shown, "is empty: the job left nothing")


def _unread(path: Path, shown: str, problem: str) -> JobRun:
    """Return a job of which nothing could be read but why."""
    return JobRun(
        name=path.stem if path.is_file() else path.name, artifact=shown, problems=(problem,)
    )

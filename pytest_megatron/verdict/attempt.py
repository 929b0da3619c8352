"""Attempts of a training, judged by their own files alone, and the verdict over all of them."""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path
from typing import assert_never

from pytest_megatron.base.files import JsonValue, read_json, write_json_atomically
from pytest_megatron.base.text import describe_exit, rough_time
from pytest_megatron.errors import GoldenError, MetricsError, TriageError
from pytest_megatron.golden.build import series_of_generation
from pytest_megatron.golden.compare.result import Comparison
from pytest_megatron.golden.compare.rl import with_one_loss_name
from pytest_megatron.golden.formats.tensorboard import find_event_files
from pytest_megatron.golden.model import (
    Generation,
    MetricMap,
    Series,
    Value,
    is_finite,
    is_loss,
    series_of,
)
from pytest_megatron.golden.store import read_metrics
from pytest_megatron.gpu.health import Health
from pytest_megatron.recipe.case import Evaluation, WorkloadCase
from pytest_megatron.runs.environment import SessionFacts
from pytest_megatron.runs.layout import AttemptDirs, ItemDirs, PhaseDirs
from pytest_megatron.runs.record import RecordedEnd, RecordedFile, RecordedVerdict
from pytest_megatron.trace.divergences import TraceComparison
from pytest_megatron.triage.api import triage_unit
from pytest_megatron.triage.diagnosis import Diagnosis
from pytest_megatron.triage.find import find_units
from pytest_megatron.triage.launch import Known, LaunchEnd, Unit
from pytest_megatron.triage.signatures import LineRole, Signature, Table, is_named, match_signature
from pytest_megatron.verdict.equivalence import Audit
from pytest_megatron.workload.plan.phases import PhaseRole, Target
from pytest_megatron.workload.run.rank_failures import (
    RankFailure,
    first_failure,
    read_failures,
    tail,
)
from pytest_megatron.workload.run.runner import End, PhaseEnd

_ENDED = {
    End.EXITED: LaunchEnd.EXITED,
    End.TIME_LIMIT: LaunchEnd.TIME_LIMIT,
    End.HUNG_COLLECTIVE: LaunchEnd.HUNG_COLLECTIVE,
    End.STOPPED: LaunchEnd.STOPPED,
}


def diagnose_phase(end: PhaseEnd, table: Table | None = None) -> Diagnosis | None:
    """Return the failure of a phase from its files; None if they show none.

    Reads nothing outside of the phase's own directory.
    """
    root = end.plan.dirs.root
    try:
        units, _ = find_units([root], root)  # holds no archive, so that nothing is unpacked
    except TriageError:
        return None
    places = (root, end.plan.dirs.logs)  # the latter where the launcher left no log
    mine = next((unit for unit in units if unit.root in places), None)
    return None if mine is None else triage_unit(_with_known(mine, end), table)


def _with_known(unit: Unit, end: PhaseEnd) -> Unit:
    known = Known(
        returncode=end.returncode,
        ended=_ENDED.get(end.end),
        world_size=None if end.plan.is_script else end.plan.world_size,
        command=unit.known.command,
    )
    return replace(unit, known=known)


def note_triage(
    dirs: ItemDirs, attempt: Path, end: PhaseEnd, found: Diagnosis | None, *, problem: str
) -> None:
    """Add an attempt that failed to the item's `triage.json`; a full disk loses it, no more.

    Args:
        dirs: Of the item.
        attempt: Directory of the attempt.
        end: Its last phase.
        found: By triage, or None.
        problem: The cause as it is printed.
    """
    ended = RecordedEnd(
        attempt=attempt.relative_to(dirs.root).as_posix(),
        phase_number=end.plan.number,
        ended=end.end.value,
        returncode=end.returncode,
        problem=problem,
    )
    row = {**asdict(ended), **({} if found is None else asdict(found.record))}
    try:
        rows = [*_rows(dirs.triage), row]
        write_json_atomically(dirs.triage, {**_first_keys(row), "attempts": rows})
    except OSError:
        return


def _first_keys(row: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """Return the keys of the file beside the attempts, some of them of the last that failed."""
    keys = ("family", "transient", "root_rank", "signature", "evidence", "text")
    return asdict(RecordedFile()) | {key: row[key] for key in keys if key in row}


def _rows(path: Path) -> list[JsonValue]:
    with contextlib.suppress(OSError, ValueError):  # missing, or damaged: a full disk
        found = read_json(path)
        rows = found.get("attempts") if isinstance(found, dict) else None
        return rows if isinstance(rows, list) else []
    return []


# Without a METRICS key these are compared, and so must be there.
# Source: Megatron-LM tests/functional_tests/python_test_utils, d98e8a64dd.
DEFAULT_METRICS = ("lm loss", "num-zeros")
_LEAST_FREE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureCause:
    """Cause of an attempt's failure.

    Attributes:
        text: One line for a person: who, what, when, which file to read.
        evidence: Last lines of the log that `text` names.
        rank: The rank that failed first, where one did.
        signature: The row of the table that it is known as, or None.
        diagnosis: All that triage found in the files of the phase that failed, or None.
        is_of_engine: Whether an engine ended the attempt, so that nothing is
            known about the code.
    """

    text: str
    evidence: tuple[str, ...] = ()
    rank: int | None = None
    signature: Signature | None = None
    diagnosis: Diagnosis | None = None
    is_of_engine: bool = False

    @property
    def is_transient(self) -> bool:
        """True if an unchanged run is expected to pass."""
        return self.signature is not None and self.signature.is_transient


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppedEarly:
    """An attempt that was ended since it could only fail.

    Attributes:
        iteration: The last one that it measured.
        last_iteration: The one that it was to reach; None where that is not known.
        saved_s: Estimate of the time that it would have trained on, or None.
        num_gpus: That it had; 0 on the CPU.
        compared: As `RepeatComparison.against` has it, and the metrics that disagree; empty where a
            loss is not finite.
    """

    iteration: int
    last_iteration: int | None
    saved_s: float | None
    num_gpus: int
    compared: tuple[tuple[str, tuple[Comparison, ...]], ...] = ()

    @property
    def text(self) -> str:
        """The time that it saved, for a person."""
        if self.saved_s is None:
            return "stopped early"
        saved = rough_time(self.saved_s * (self.num_gpus or 1))
        return (
            f"stopped early: saved about {saved.replace(' ', ' GPU-') if self.num_gpus else saved}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One execution of a workload.

    Attributes:
        repeat: Counted from 1, as `number` is.
        ends: Of the phases, without those of an audit.
        metrics: What each phase measured; fewer than phases where one failed.
        cause: None if it trained as it should.
        health: Of its GPUs before and after; None without GPUs.
        is_in_windows: Whether the phases are the windows of one training, a release's.
        generation: What an inference program generated, which measures no series.
        gradients: For each phase but the first of a checkpoint-consistency, its name and how its
            gradients compare with those of the first.
        equivalence: How its traces compare with those of the layout that the row names, or None.
        audit: Result of its determinism audit, or None.
        audit_ends: Of the phases of the audit.
        facts: Where and with what it ran; None where that is the controller's machine.
        suspects: The machines that failed under it, where it was theirs.
        stopped: Of one that was stopped since it could only fail; it has a cause as well.
    """

    repeat: int
    number: int
    dirs: AttemptDirs
    ends: tuple[PhaseEnd, ...]
    metrics: tuple[MetricMap, ...]
    cause: FailureCause | None
    health: Health | None = None
    is_in_windows: bool = False
    generation: Generation | None = None
    gradients: tuple[tuple[str, tuple[Comparison, ...]], ...] = ()
    equivalence: TraceComparison | None = None
    audit: Audit | None = None
    audit_ends: tuple[PhaseEnd, ...] = ()
    facts: SessionFacts | None = None
    suspects: tuple[str, ...] = ()
    stopped: StoppedEarly | None = None

    @property
    def series(self) -> MetricMap:
        """`whole` as series, so that repeats of any kind can be set beside one another."""
        return self.whole if self.generation is None else series_of_generation(self.generation)

    @property
    def whole(self) -> MetricMap:
        """Metrics that are compared with a golden: of the first phase, or all windows in one."""
        return join_windows(self.metrics) if self.is_in_windows else self.metrics[0]

    @property
    def whole_path(self) -> Path:
        """The file with `whole`, or with what was generated."""
        if self.generation is not None:
            return self.dirs.phase(1).generated
        return self.dirs.metrics if self.is_in_windows else self.dirs.phase(1).metrics

    @property
    def duration_s(self) -> float:
        """Time of all its phases."""
        return sum(end.duration_s for end in self.all_ends)

    @property
    def all_ends(self) -> tuple[PhaseEnd, ...]:
        """The ends of all phases, in the order in which they ran."""
        return (*self.audit_ends, *self.ends)


def judge_attempt(
    ends: Sequence[PhaseEnd],
    *,
    metric_names: Sequence[str] | None,
    time_limit_s: float,
    target: Target | None = None,
    is_rl: bool = False,
    table: Table | None = None,
) -> tuple[tuple[MetricMap, ...], FailureCause | None]:
    """Return what the phases measured and what is wrong with them, if anything.

    Args:
        ends: The phases in order; at most the last of them is not clean.
        metric_names: What must have been measured; None for a script that judges itself.
        time_limit_s: For the text.
        target: Where a release ends; its windows are then parts of one training.
        is_rl: Whether the loss may stand under another name.
        table: The signatures; None takes those of the package.
    """
    measured: list[MetricMap] = []
    resumes_after = None
    for end in ends:
        if end.end is End.STOPPED:
            with contextlib.suppress(MetricsError):  # it was read while the phase ran
                measured.append(measured_in(end.plan.dirs, is_rl=is_rl))
        if not end.is_clean:
            return tuple(measured), why_it_failed(end, time_limit_s, table)
        if metric_names is None:
            continue
        if not has_metrics(end.plan.dirs):
            return tuple(measured), FailureCause(
                text="the training ended with exit code 0, but wrote no metrics: neither JSON "
                "lines to $PYTEST_MEGATRON_METRICS nor TensorBoard files to $TENSORBOARD_PATH; "
                f"looked in {end.plan.dirs.root}"
            )
        try:
            metrics = measured_in(end.plan.dirs, is_rl=is_rl)
        except MetricsError as error:
            return tuple(measured), FailureCause(
                text=f"the training ended with exit code 0, but {error}"
            )
        measured.append(metrics)
        last = end.plan.last_iteration
        if target is not None and end is ends[-1]:
            metrics, last = join_windows(measured), target.iteration
        problem = find_problem(metrics, metric_names, last) or _not_resumed(
            measured[-1], metric_names, end.plan.resumes_after or resumes_after
        )
        resumes_after = end.saved
        if problem:
            return tuple(measured), FailureCause(
                text=f"{_phase(end)}{problem}; see {end.plan.dirs.launcher_log}"
            )
    return tuple(measured), None


def join_windows(windows: Sequence[MetricMap]) -> MetricMap:
    """Return the metrics of windows as those of one training.

    Where a window went on beyond its last checkpoint, the next one trained those steps again;
    its values count, since the training went on from them.
    """
    if len(windows) == 1:
        return windows[0]
    joined: dict[str, dict[int, Value]] = {}
    for window in windows:
        for name, series in window.items():
            joined.setdefault(name, {}).update(series.items())
    is_full = all(series.is_full_precision for window in windows for series in window.values())
    return {name: series_of(values, is_full_precision=is_full) for name, values in joined.items()}


def has_metrics(dirs: PhaseDirs) -> bool:
    """Return whether a phase has begun to write what it measures."""
    return dirs.metrics_lines.exists() or bool(find_event_files(dirs.tensorboard))


def measured_in(dirs: PhaseDirs, *, is_rl: bool) -> MetricMap:
    """Return what a phase wrote so far: JSON lines where it wrote any, else TensorBoard files.

    Raises:
        MetricsError: It wrote nothing, or it cannot be read.
    """
    lines = dirs.metrics_lines
    metrics = read_metrics(lines if lines.exists() else dirs.tensorboard).metrics
    return with_one_loss_name(metrics) if is_rl else metrics


def find_problem(metrics: MetricMap, names: Sequence[str], last: int | None) -> str | None:
    """Say what is wrong with what a training measured: missing, ended early, not finite."""
    return _incomplete(metrics, names, last) or find_non_finite(metrics, names)


def _incomplete(metrics: MetricMap, names: Sequence[str], last: int | None) -> str | None:
    """Say which metric is missing, or that the training stopped early."""
    for name in names:
        series = metrics.get(name)
        if series is None or not len(series):
            found = ", ".join(sorted(metrics))
            return f"the training wrote no {name!r}, only {found}"
        if last is not None and series.steps[-1] + _interval(series) <= last:
            return (
                f"the training ended with exit code 0, but {name} stops at step "
                f"{series.steps[-1]}, expected it to go on to {last}"
            )
    return None


def _not_resumed(metrics: MetricMap, names: Sequence[str], after: int | None) -> str | None:
    """Say that a training started anew where it had a checkpoint to go on from."""
    first = min((metrics[name].steps[0] for name in names), default=None)
    if after is None or first is None or first > after:
        return None
    return (
        f"it did not load its checkpoint: its first step is {first}, expected it to go on after "
        f"{after}; set --load to ${{CHECKPOINT_LOAD_PATH}}"
    )


def find_non_finite(metrics: MetricMap, names: Sequence[str]) -> str | None:
    """Return the text for a loss that is not finite, None without one."""
    for name in names:
        for step, value in metrics[name].items():
            if not is_finite(value) and is_loss(name):
                return f"{name} is {value} at step {step}, the first that is not finite"
    return None


def _interval(series: Series) -> int:
    """Return the smallest distance of two steps; 1 where there is only one."""
    gaps = [b - a for a, b in zip(series.steps, series.steps[1:], strict=False)]
    return min(gaps, default=1)


def why_it_failed(end: PhaseEnd, time_limit_s: float, table: Table | None = None) -> FailureCause:
    """Explain a phase that is not clean."""
    dirs = end.plan.dirs
    when = _phase(end) + _when(end)
    match end.end:
        case End.NO_CHECKPOINT | End.NOT_DONE:
            text = f"{_phase(end)}the training ended with exit code 0, but {end.problem}"
            return FailureCause(text=text)
        case End.STOPPED:
            when = "early" if end.progress is None else when
            return FailureCause(text=f"stopped {when}: {end.problem}; see {dirs.launcher_log}")
        case End.SCRIPT:
            return _why_a_script_failed(end)
        case End.TIME_LIMIT:
            where = _where_ranks_were(read_failures(dirs))
            text = f"time limit of {time_limit_s:g} s reached {when}{where}; see {dirs.logs}"
            found = diagnose_phase(end, table)
            return FailureCause(text=text, signature=signature_of(found), diagnosis=found)
        case End.HUNG_COLLECTIVE:
            where = _where_ranks_were(read_failures(dirs))
            return _why_it_hung(end, where, when, diagnose_phase(end, table))
        case End.EXITED:
            return _why_it_exited(end, when, diagnose_phase(end, table))
    assert_never(end.end)


def _why_it_hung(end: PhaseEnd, where: str, when: str, found: Diagnosis | None) -> FailureCause:
    """Explain a collective that did not finish, by the rank that is missing if it is known."""
    logs = end.plan.dirs.logs
    rank = end.hung_rank
    guilty = ""
    if found is not None and found.record.root_rank not in (None, rank):
        rank = found.record.root_rank
        guilty = f", rank {rank} {found.what}"
    text = f"rank {end.hung_rank} reported it{guilty}{where}; see {logs}"
    return FailureCause(
        text=f"a collective did not finish {when}: {text}",
        rank=rank,
        signature=signature_of(found),
        diagnosis=found,
    )


def signature_of(found: Diagnosis | None) -> Signature | None:
    """Return the row that a failure is known as, None where that has no meaning."""
    return found.row if found is not None and is_named(found.row) else None


def _first(failures: Sequence[RankFailure], found: Diagnosis | None) -> RankFailure | None:
    """Return what the rank left that a failure began with, None if it was none."""
    if found is None or (found.record.root_rank is None and not is_named(found.row)):
        return first_failure(failures)
    return next((f for f in failures if f.rank == found.record.root_rank), None)


def _why_it_exited(end: PhaseEnd, when: str, found: Diagnosis | None) -> FailureCause:
    """Explain an exit that was not a success."""
    dirs = end.plan.dirs
    first = _first(read_failures(dirs), found)
    said = tail(dirs.launcher_log)
    full = _full_disk(dirs.root)
    if first is None:
        who = "the script" if end.plan.is_script else "the launcher"
        silence = "" if end.plan.is_script else f" {when} and no rank said why"
        return FailureCause(
            text=f"{who} {_ended(end.returncode)}{silence}{full}; see {dirs.launcher_log}",
            evidence=said,
            signature=signature_of(found),
            diagnosis=found,
        )
    what = _what_it_did(first, found)
    log = _readable(first, dirs.logs)
    return FailureCause(
        text=f"rank {first.rank} of {end.plan.world_size} {what} {when}{full}; see {log}",
        evidence=first.tail if first.exit_code != -signal.SIGKILL else (),  # it had no last words
        rank=first.rank,
        signature=signature_of(found),
        diagnosis=found,
    )


def _what_it_did(failure: RankFailure, found: Diagnosis | None) -> str:
    """Return what a rank did, in its own words where it has any."""
    if found is not None and failure.is_consequence and found.row.role is LineRole.CASCADE:
        return found.what
    if failure.message is None and failure.exit_code is None and found is not None:
        return found.what
    return f"raised {failure.message}" if failure.message else _ended(failure.exit_code)


def _why_a_script_failed(end: PhaseEnd) -> FailureCause:
    """Explain a script of the case that was not a success."""
    assert end.script is not None
    script = end.script
    how = "reached the time limit" if script.returncode is None else _ended(script.returncode)
    which = "before the training" if script.key == "BEFORE_SCRIPT" else "after a clean training"
    said = tail(script.log)
    return FailureCause(
        text=f"{_phase(end)}{script.key} {how} {which}; see {script.log}",
        evidence=said,
        signature=match_signature(said),
    )


def _full_disk(directory: Path) -> str:
    """Say that the disk is full, where it is: a rank that dies of it cannot even log it."""
    return "; the disk is full" if shutil.disk_usage(directory).free < _LEAST_FREE_BYTES else ""


def _readable(failure: RankFailure, logs: Path) -> Path:
    """Return the log to read: stderr.log, or stdout.log where that is empty."""
    stdout = logs / str(failure.rank) / "stdout.log"
    return failure.log if failure.tail or not tail(stdout) else stdout


def _where_ranks_were(failures: Sequence[RankFailure]) -> str:
    """Return where each rank's Python was when it was stopped."""
    frames = [f"rank {f.rank} was at {f.frame}" for f in failures if f.frame is not None]
    return f"; {', '.join(frames)}" if frames else ""


def _when(end: PhaseEnd) -> str:
    if end.progress is None:
        return "before the first iteration"
    return f"after iteration {end.progress.iteration} of {end.progress.last}"


def _phase(end: PhaseEnd) -> str:
    if end.plan.role is not PhaseRole.TRAINING:
        return f"in phase {end.plan.name} "
    return f"in {end.plan.name} " if end.plan.number > 1 else ""


def _ended(exit_code: int | None) -> str:
    if exit_code is None:
        return "failed"
    if exit_code < 0:
        return describe_exit(exit_code)
    return f"ended with exit code {exit_code}"


def judge_generation(
    ends: Sequence[PhaseEnd],
    *,
    metric_names: Sequence[str],
    time_limit_s: float,
    table: Table | None = None,
) -> tuple[Generation | None, FailureCause | None]:
    """Return what an inference program generated and what is wrong with it, if anything.

    Args:
        ends: Its phases; there is one.
        metric_names: What must be there, for the run or for every request.
        time_limit_s: For the text.
        table: The signatures; None takes those of the package.
    """
    (end,) = ends
    if not end.is_clean:
        return None, why_it_failed(end, time_limit_s, table)
    path = end.plan.dirs.generated
    if not path.exists():
        text = (
            f"the program ended with exit code 0, but wrote no {path}, expected its requests "
            f"there; give it the path ${{INFERENCE_OUTPUT_PATH}}; see {end.plan.dirs.launcher_log}"
        )
        return None, FailureCause(text=text)
    try:
        generation = read_metrics(path).generation
    except (GoldenError, MetricsError) as error:
        return None, FailureCause(text=f"the program ended with exit code 0, but {error}")
    if generation is None:
        return None, FailureCause(text=f"{path}: holds series of a training, expected requests")
    for name in metric_names:
        if not generation.has(name):
            return generation, FailureCause(text=missing_metric(generation, name, str(path)))
    return generation, None


def missing_metric(generation: Generation, name: str, path: str) -> str:
    """Say which metric is not there, and what is."""
    keys = {key for request in generation.requests.values() for key in request.content}
    found = ", ".join(sorted({*keys, *generation.content} - {"input_prompt"}))
    return f"the program wrote no {name!r} for every request, only {found}; see {path}"


class Verdict(Enum):
    """The decision over all attempts and repeats of a workload."""

    _value_: RecordedVerdict

    PASSED = "passed"
    FAILED = "failed"  # the training failed, or a metric disagrees
    FLAKY = "flaky"  # passed after a transient failure
    BROKEN = "broken"  # the infrastructure failed to the end: nothing is known about the code


def decide_training(attempts: Sequence[Attempt]) -> Verdict:
    """Decide what the attempts say before any golden is looked at.

    Every repeat's last attempt counts; the earlier ones of it failed for a transient cause.
    """
    final = {attempt.repeat: attempt for attempt in attempts}
    causes = [attempt.cause for attempt in final.values() if attempt.cause is not None]
    if any(not (cause.is_transient or cause.is_of_engine) for cause in causes):
        return Verdict.FAILED
    if causes:
        return Verdict.BROKEN
    return Verdict.FLAKY if len(attempts) > len(final) else Verdict.PASSED


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """What is left of a problem once it is known what was expected.

    Attributes:
        problem: Why the workload does not pass, or None.
        is_expected: Whether it failed as it was expected to.
    """

    problem: str | None
    is_expected: bool = False


def evaluate(case: WorkloadCase | None, node_id: str, problem: str | None) -> Evaluated:
    """Return what a judged workload comes to; a broken one must not be brought here.

    Args:
        case: None for a row with a script.
        node_id: Begins the text of a new problem.
        problem: Why it failed, evidence included; None if it passed.
    """
    if case is None or case.evaluation is Evaluation.PASS:
        return Evaluated(problem=problem)
    if problem is None:
        text = (
            f"{node_id}: passed, but TEST_EVALUATION is xpass, so it was expected to fail; "
            f"if that is mended, remove TEST_EVALUATION from {case.path}"
        )
        return Evaluated(problem=text)
    pattern = case.expected_failure
    if pattern is None or re.search(pattern, problem):
        return Evaluated(problem=problem, is_expected=True)
    return Evaluated(problem=f"{problem}\nnot the failure that was expected: {pattern!r}")

"""Attempts of a training, judged by their own files alone, and the verdict over all of them."""

from __future__ import annotations

import contextlib
import itertools
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import assert_never

from pytest_megatron.base.files import JsonValue, read_end, read_json, write_json_atomically
from pytest_megatron.base.text import counted, describe_exit, name_ranks
from pytest_megatron.errors import GoldenError, MetricsError, TriageError
from pytest_megatron.runs.headline import headline_fingerprint, make_headline, where_ranks_were
from pytest_megatron.runs.layout import AttemptDirs, ItemDirs, PhaseDirs
from pytest_megatron.runs.record import (
    RecordedDiagnosis,
    RecordedEvidence,
    RecordedFailure,
    RecordedFile,
    RecordedVerdict,
    to_json,
)
from pytest_megatron.triage.api import triage_unit
from pytest_megatron.triage.diagnosis import Diagnosis
from pytest_megatron.triage.find import find_units
from pytest_megatron.triage.logs.lines import is_noise
from pytest_megatron.triage.logs.traceback import frame_of, innermost
from pytest_megatron.triage.rank_log import End, Known, Unit
from pytest_megatron.triage.signatures import (
    Signature,
    Table,
    builtin_table,
    is_named,
    match_signature,
)
from pytest_megatron.workloads.engine.api import SubmissionOutcome
from pytest_megatron.workloads.golden.build import series_of_generation
from pytest_megatron.workloads.golden.collect import has_measured, read_measured
from pytest_megatron.workloads.golden.compare.result import Comparison
from pytest_megatron.workloads.golden.model import (
    Generation,
    MetricMap,
    Observed,
    Series,
    Value,
    is_finite,
    is_loss,
    refuse_disagreements,
    with_one_loss_name,
)
from pytest_megatron.workloads.golden.store import read_metrics
from pytest_megatron.workloads.recipe.case import Evaluation, Launcher, WorkloadCase
from pytest_megatron.workloads.training.run.runner import PhaseEnd, tail, traceback_at

_PROGRAM = "the program"


def diagnose_phase(
    end: PhaseEnd, time_limit_s: float | None = None, table: Table | None = None
) -> Diagnosis | None:
    """Return the failure of a phase from its files; None if they show none.

    Reads nothing outside of the phase's own directory, and the logs that a script had its ranks
    write.
    """
    dirs, progress = end.plan.dirs, end.progress
    at = progress if progress is not None and progress.has_step else None
    places = (dirs.root, dirs.logs)  # the latter where the launcher left no log
    own = next((unit for unit in _units(dirs.root) if unit.root in places), None)
    known = Known(
        program=_program(end),
        returncode=end.returncode,
        ended=end.end,
        limit_s=time_limit_s,
        iteration=None if at is None else (at.iteration, at.last),
        far=None if progress is None else progress.text,
        quiet_s=end.quiet_s,
        outlived=end.outlived,
        world_size=None if end.plan.is_script else end.plan.world_size,
    )
    assets = AttemptDirs(root=dirs.root.parent).assets
    started = [u for u in _units(assets) if u.ranks] if end.plan.is_script else []
    started.sort(key=lambda unit: max(log.path.stat().st_mtime for log in unit.logs), reverse=True)
    logs = () if own is None else own.logs
    shown = {log.shown for log in logs}
    for unit in started:
        joined = replace(unit, logs=(*unit.logs, *logs), known=known)
        found = triage_unit(joined, table)
        if (
            found is not None
            and found.record.evidence[:1]
            and found.record.evidence[0].file not in shown
        ):
            return found
    if own is None:
        return None
    if _program(end) == _PROGRAM and end.end is End.EXITED:
        own = _with_ranks_of_its_own(own)
    return triage_unit(replace(own, known=known), table)


# What launchers and ranks write into a log that they share.
_OF_RANKS = re.compile(
    rb"^\[rank[1-9]\d*\]: |\(local_rank: \d+\)|failed \(exitcode: |exits with return code = "
    rb"|, in simple_launcher$|^\[rank: \d+\] Child process with PID |/gloo/transport/tcp/",
    re.MULTILINE,
)
_SHARED_BYTES = 1 << 18  # at a log's end


def _with_ranks_of_its_own(unit: Unit) -> Unit:
    """Return the launch of a program that was started alone as that of the ranks that it started.

    Its log is then that of a launcher; ours knows of one process, and counts no more.
    """
    own = [replace(log, rank=None) for log in unit.logs if log.rank is not None]
    if not any(_OF_RANKS.search(read_end(log.path, _SHARED_BYTES)) for log in own):
        return unit
    return replace(unit, logs=tuple(own))


def _units(directory: Path) -> tuple[Unit, ...]:
    """Return the launches with logs below a directory that holds no archive."""
    try:
        return find_units([directory], directory)[0]
    except TriageError:
        return ()


def note_triage(dirs: ItemDirs, attempt: Path, end: PhaseEnd, cause: FailureCause) -> None:
    """Add an attempt that failed to the item's `triage.json`; a full disk loses it, no more.

    Args:
        dirs: Directories of the item.
        attempt: Directory of the attempt.
        end: End of the last phase.
        cause: Why it failed.
    """
    failure = RecordedFailure(
        **vars(cause.record),
        attempt=attempt.relative_to(dirs.root).as_posix(),
        phase_number=end.plan.number,
        ended=end.end.value,
        returncode=end.returncode,
        problem=cause.text,
        outlived=end.outlived,
    )
    row = to_json(failure)
    try:
        rows = [*_rows(dirs.triage), row]
        write_json_atomically(dirs.triage, {**_first_keys(row), "attempts": rows})
    except OSError:
        return


def _first_keys(row: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """Return the keys that triage.json has beside the attempts, with those of the last failure."""
    keys = ("family", "transient", "root_rank", "signature", "evidence", "headline", "text")
    return to_json(RecordedFile()) | {key: row[key] for key in keys}


def _rows(path: Path) -> list[JsonValue]:
    """Return the attempts that triage.json has, none if it is missing or damaged."""
    with contextlib.suppress(OSError, ValueError):  # missing, or damaged: a full disk
        found = read_json(path)
        rows = found.get("attempts") if isinstance(found, dict) else None
        return rows if isinstance(rows, list) else []
    return []


# Without a METRICS key these are compared, and so must be there.
# Source: Megatron-LM tests/functional_tests/python_test_utils, d98e8a64dd.
_ERROR = "E   "
_OF_PYTEST = ("FAILED ", "ERROR ", _ERROR)  # lines with what failed
DEFAULT_METRICS = ("lm loss", "num-zeros")
_LEAST_FREE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureCause:
    """Cause of an attempt's failure.

    Attributes:
        text: The headline, as `make_headline` words it.
        see: File to read, with a line where one is known.
        evidence: Lines that show it.
        rank: The rank that failed first, where one did.
        signature: The row of the table that it is known as, or None.
        diagnosis: All that triage found in the files of the phase that failed, or None.
        is_of_engine: Whether an engine ended the attempt, so that nothing is
            known about the code.
        is_after_training: Whether the training is whole, and only what came after it failed.
    """

    text: str
    see: str = ""
    evidence: tuple[str, ...] = ()
    rank: int | None = None
    signature: Signature | None = None
    diagnosis: Diagnosis | None = None
    is_of_engine: bool = False
    is_after_training: bool = False

    @property
    def is_transient(self) -> bool:
        """True if an unchanged run is expected to pass."""
        return self.signature is not None and self.signature.is_transient

    @property
    def record(self) -> RecordedDiagnosis:
        """The cause as `triage.json` has it."""
        row, found = self.signature, self.diagnosis
        if found is not None:
            return replace(found.record, headline=self.text)
        return RecordedDiagnosis(
            family=None if row is None else row.family,
            transient=self.is_transient,
            root_rank=self.rank,
            signature=None if row is None else row.id,
            headline=self.text,
            text=f"{self.text[:1].upper()}{self.text[1:]}.",
            advice=None if row is None else row.advice,
            fingerprint=headline_fingerprint(self.text),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt(SubmissionOutcome):
    """One execution of a workload: what came of it, and what that means.

    Attributes:
        repeat: Counted from 1, as `number` is.
        metrics: What each phase measured; fewer than phases where one failed.
        cause: None if it trained as it should.
        generation: What an inference program generated, which measures no series.
        gradients: For each phase but the first of a checkpoint-consistency, its name and how its
            gradients compare with those of the first.
        stopped: Why there is no attempt after it, although its cause is transient.
    """

    repeat: int
    number: int
    dirs: AttemptDirs
    metrics: tuple[MetricMap, ...]
    cause: FailureCause | None
    generation: Generation | None = None
    gradients: tuple[tuple[str, tuple[Comparison, ...]], ...] = ()
    stopped: str | None = None

    @property
    def note(self) -> str | None:
        """What is odd about it although it trained as it should, or None."""
        stayed = (end.waiting for end in self.ends if end.waiting and end.is_clean)
        return next((f"{name_ranks(ranks)} did not exit" for ranks in stayed), None)

    @property
    def signature(self) -> str | None:
        """Id of the row of the table that its failure is known as, or None."""
        row = None if self.cause is None else self.cause.signature
        return None if row is None else row.id

    @property
    def is_whole(self) -> bool:
        """True if it trained as it should, whatever came after."""
        return self.cause is None or self.cause.is_after_training

    @property
    def series(self) -> MetricMap:
        """`whole` as series, so that repeats of any kind can be set beside one another."""
        return self.whole if self.generation is None else series_of_generation(self.generation)

    @property
    def whole(self) -> MetricMap:
        """Metrics that are compared with a golden: of the first phase."""
        return self.metrics[0]

    @property
    def whole_path(self) -> Path:
        """The file with `whole`, or with what was generated."""
        if self.generation is not None:
            return self.dirs.phase(1).generated
        return self.dirs.phase(1).metrics

    @property
    def duration_s(self) -> float:
        """Time of all its phases."""
        return sum(end.duration_s for end in self.ends) or self.lost_s


def why_it_ended(
    ends: Sequence[PhaseEnd], last_phase: int, time_limit_s: float, table: Table | None = None
) -> FailureCause | None:
    """Return what is wrong with the end of the last phase that ran, None of a good end.

    Args:
        ends: The phases in order; at most the last of them is not clean.
        last_phase: Number of the last phase of the plan.
        time_limit_s: For the text.
        table: The signatures; None takes those of the package.
    """
    last = ends[-1]
    if last.is_clean and last.end is not End.NOT_EXITED:
        return None
    cause = why_it_failed(last, time_limit_s, table)
    is_over = last.end is End.NOT_EXITED and last.plan.number == last_phase
    if last.is_clean and (cause.diagnosis is None or not is_over):
        return None
    return replace(cause, is_after_training=is_over)


def judge_metrics(
    ends: Sequence[PhaseEnd],
    *,
    names: Sequence[str] | None,
    is_over: bool = True,
    is_rl: bool = False,
    table: Table | None = None,
) -> tuple[tuple[MetricMap, ...], FailureCause | None]:
    """Return what the phases measured and what is wrong with it, if anything.

    Args:
        ends: The phases in order.
        names: What must have been measured; None for a script that judges itself.
        is_over: Whether the last of them trained to its end.
        is_rl: Whether the loss may stand under another name.
        table: The signatures; None takes those of the package.
    """
    measured: list[MetricMap] = []
    trained = ends if is_over else ends[:-1]
    for end in () if names is None else trained:
        if not names:  # of a few steps there may be nothing
            measured.append(_measured_so_far(end, is_rl=is_rl) or {})
            continue
        left = left_behind(end.num_left)
        if not has_measured(end.plan.dirs):
            return tuple(measured), FailureCause(
                text=f"the training ended with exit code 0{left}, but wrote no metrics: neither "
                "JSON lines to $PYTEST_MEGATRON_METRICS nor TensorBoard files to $TENSORBOARD_PATH",
                see=str(end.plan.dirs.root),
            )
        try:
            metrics = measured_in(end.plan.dirs, is_rl=is_rl, names=names)
        except MetricsError as error:
            far = "" if end.progress is None else f" {_when(end)}"
            return tuple(measured), FailureCause(
                text=f"the training ended with exit code 0{far}{left}, but {error}"
            )
        measured.append(metrics)
        last = end.plan.last_iteration
        problem = find_problem(metrics, names, last, left) or _not_resumed(
            measured[-1],
            names,
            end.plan.resumes_after,
            is_own=end.plan.origin is not None and end.plan.origin.is_own,
        )
        if problem:
            text = make_headline("", problem, when=_phase(end))
            see = str(end.plan.dirs.launcher_log)
            return tuple(measured), FailureCause(
                text=text, see=see, signature=_known(problem, table)
            )
    if not is_over and ends[-1].end is End.STOPPED:  # it was read while the phase ran
        found = _measured_so_far(ends[-1], is_rl=is_rl)
        measured += [] if found is None else [found]
    return tuple(measured), None


def _measured_so_far(end: PhaseEnd, *, is_rl: bool) -> MetricMap | None:
    """Return what a phase measured; None where that cannot be read."""
    with contextlib.suppress(MetricsError):
        return measured_in(end.plan.dirs, is_rl=is_rl)
    return None


def measured_in(dirs: PhaseDirs, *, is_rl: bool, names: Sequence[str] = ()) -> MetricMap:
    """Return what a phase wrote so far, the loss of reinforcement learning under one name.

    Args:
        dirs: Of the phase.
        is_rl: Whether the loss may stand under another name.
        names: Metrics that may have only one value at a step.

    Raises:
        MetricsError: It wrote nothing, it cannot be read, or one of `names` has two values.
    """
    return one_value_each(read_measured(dirs), names, is_rl=is_rl)


def one_value_each(found: Observed, names: Sequence[str], *, is_rl: bool) -> MetricMap:
    """Return what was measured, the loss of reinforcement learning under one name.

    Raises:
        MetricsError: One of `names` has two values at a step.
    """
    if not is_rl:
        refuse_disagreements(found.disagreements, names)
        return found.metrics
    refuse_disagreements(with_one_loss_name(found.disagreements), names)
    return with_one_loss_name(found.metrics)


def find_problem(
    metrics: MetricMap, names: Sequence[str], last: int | None, left: str = ""
) -> str | None:
    """Say what is wrong with what a training measured: missing, ended early, not finite.

    Args:
        metrics: What it measured.
        names: What it must have measured.
        last: The step that it should get to.
        left: What it left in the background, as `left_behind` says it.
    """
    incomplete = find_incomplete(metrics, names, last)
    if incomplete and left:
        return f"{incomplete}; it ended{left}"
    return incomplete or find_non_finite(metrics, names)


def left_behind(num_left: int) -> str:
    """Say that a program ended before what it had started; nothing if it did not."""
    if not num_left:
        return ""
    return (
        f", and {counted(num_left, 'process', 'processes')} that it left in the background "
        f"{'was' if num_left == 1 else 'were'} ended"
    )


def find_incomplete(metrics: MetricMap, names: Sequence[str], last: int | None) -> str | None:
    """Say which metric is missing, or that the training stopped early.

    One value alone, as of an evaluation, says nothing about its distance to the next one: another
    metric then has to go on to the end.
    """
    others = [name for name in names if len(metrics.get(name, ())) > 1]
    for name in names:
        series = metrics.get(name)
        if series is None or not len(series):
            found = ", ".join(sorted(metrics))
            return f"the training wrote no {name!r}, only {found}"
        is_done = last is None or _is_near(series, last)
        is_rare = len(series) == 1 and any(_is_near(metrics[n], last or 0) for n in others)
        if not is_done and not is_rare:
            return (
                f"the training ended with exit code 0, but {name} stops at step "
                f"{series.steps[-1]}, expected it to go on to {last}"
            )
    return None


def _not_resumed(
    metrics: MetricMap, names: Sequence[str], after: int | None, *, is_own: bool
) -> str | None:
    """Say that a training started anew where it had a checkpoint to go on from."""
    first = min((metrics[name].steps[0] for name in names), default=None)
    if after is None or first is None or first > after:
        return None
    fix = "set --load to ${CHECKPOINT_LOAD_PATH}"
    if is_own:
        fix = (
            "see `load` of resume, and whether the program restores its count of steps, and logs "
            "to a place that holds none of before"
        )
    return (
        f"it did not load its checkpoint: its first step is {first}, expected it to go on after "
        f"{after}; {fix}"
    )


def find_non_finite(metrics: MetricMap, names: Sequence[str]) -> str | None:
    """Return the text for the first loss that is not finite, None without one."""
    odd = first_non_finite(metrics, names)
    if odd is None:
        return None
    step, name, value = odd
    return f"{name} is {value} at step {step}, the first that is not finite"


def first_non_finite(metrics: MetricMap, names: Sequence[str]) -> tuple[int, str, Value] | None:
    """Return step, name and value of the first loss that is not finite, None without one."""
    odd = (
        (step, name, value)
        for name in filter(is_loss, names)
        for step, value in metrics[name].items()
        if not is_finite(value)
    )
    return min(odd, key=lambda one: one[0], default=None)


def _is_near(series: Series, last: int) -> bool:
    """Return whether no further value of a metric is to be expected up to a step."""
    gaps = [b - a for a, b in itertools.pairwise(series.steps)]
    return series.steps[-1] + max(gaps, default=1) > last


def why_it_failed(end: PhaseEnd, time_limit_s: float, table: Table | None = None) -> FailureCause:
    """Explain a phase that is not clean: what triage finds in its files, where it is of those."""
    dirs = end.plan.dirs
    when = ", ".join(filter(None, (_when(end), _phase(end))))
    match end.end:
        case End.NO_CHECKPOINT:
            what = f"ended with exit code 0, but {end.problem}"
            return FailureCause(text=make_headline("the training", what, when=_phase(end)))
        case End.STOPPED:
            how = "stopped early" if end.progress is None else f"stopped {when}"
            text = f"{how}: {end.problem}"
            known = _known(text, table)
            return FailureCause(text=text, see=str(dirs.launcher_log), signature=known)
        case End.SCRIPT:
            return _why_a_script_failed(end)
        case End.TIME_LIMIT:
            ended = f"time limit of {time_limit_s:g} s reached"
        case End.HUNG_COLLECTIVE:
            ended = f"a collective did not finish: rank {end.hung_rank} reported it"
        case End.NOT_EXITED:
            ended = "trained to the end"
        case End.EXITED:
            ended = f"{_program(end)} {_ended(end.returncode)}"
        case _:
            assert_never(end.end)
    found = diagnose_phase(end, time_limit_s, table)
    if found is None:
        text = make_headline("", ended, when=when)
        plain = FailureCause(text=text, see=str(dirs.logs), rank=end.hung_rank)
        return _why_it_stayed(end, table) if end.end is End.NOT_EXITED else plain
    root = found.record
    text = ", ".join(filter(None, (root.headline, _phase(end))))
    if end.end is End.TIME_LIMIT and root.family != "time_limit":
        text = f"{text}; {ended}"
    has_place = bool(root.evidence) and root.family != "time_limit"
    place = root.evidence[0] if has_place else None
    return FailureCause(
        text=f"{text}{_full_disk(dirs.root)}",
        see=str(dirs.logs) if place is None else f"{place.file}:{place.line}",
        evidence=() if place is None else _shown(end, root, place),
        rank=end.hung_rank if root.root_rank is None else root.root_rank,
        signature=signature_of(found),
        diagnosis=found,
    )


def _why_it_stayed(end: PhaseEnd, table: Table | None) -> FailureCause:
    """Explain a program that had done its work, and did not exit."""
    dirs = end.plan.dirs
    logs = {rank: dirs.logs / str(rank) / "stderr.log" for rank in end.waiting}
    stacks = {rank: tail(log) for rank, log in logs.items() if log.exists()}
    where = where_ranks_were({rank: _innermost(stack) for rank, stack in stacks.items()})
    what = f"trained to the end, and {name_ranks(end.waiting)} did not exit"
    return FailureCause(
        text=make_headline("", what, where=where, when=_phase(end)),
        see=str(end.plan.dirs.logs),
        evidence=next(iter(stacks.values()), tail(end.plan.dirs.launcher_log)),
        rank=min(end.waiting),
        signature=_known(what, table),
    )


def _innermost(stack: Sequence[str]) -> str | None:
    """Return where the current thread was by faulthandler, outside of libraries if it was there."""
    heads = (place for place, line in enumerate(stack) if line.startswith("Current thread"))
    frames = [frame for frame in map(frame_of, stack[next(heads, 0) :]) if frame is not None]
    return innermost(frames)


def _shown(end: PhaseEnd, root: RecordedDiagnosis, place: RecordedEvidence) -> tuple[str, ...]:
    """Return the lines that show a cause: the traceback, or else what triage points to."""
    if root.family == "unknown":
        return tail(end.plan.dirs.launcher_log)
    lines = traceback_at(Path(place.file), place.line)
    return lines or tuple(dict.fromkeys(one.text for one in root.evidence))


def signature_of(found: Diagnosis | None) -> Signature | None:
    """Return the row that a failure is known as, None where that has no meaning."""
    return found.row if found is not None and is_named(found.row) else None


def _known(problem: str, table: Table | None) -> Signature | None:
    """Return the row that a problem with what was measured is known as."""
    row = (table or builtin_table()).raised(problem)
    return row if row is not None and is_named(row) else None


def _why_a_script_failed(end: PhaseEnd) -> FailureCause:
    """Explain a script of the case that was not a success."""
    assert end.script is not None
    script = end.script
    how = "reached the time limit" if script.returncode is None else _ended(script.returncode)
    which = "before the training" if script.key == "BEFORE_SCRIPT" else "after a clean training"
    said = tail(script.log)
    words = [line for line in said if not is_noise(line)]
    last = f"; its last words: {words[-1]!r}" if words else ""
    return FailureCause(
        text=make_headline(script.key, f"{how} {which}{last}", when=_phase(end)),
        see=str(script.log),
        evidence=said,
        signature=match_signature(said),
    )


def _full_disk(directory: Path) -> str:
    """Say that the disk is full, where it is: a rank that dies of it cannot even log it."""
    return "; the disk is full" if shutil.disk_usage(directory).free < _LEAST_FREE_BYTES else ""


def _when(end: PhaseEnd) -> str:
    """Describe how far a phase was."""
    if end.progress is None:
        return "before the first iteration"
    return f"after {end.progress.text}"


def _phase(end: PhaseEnd) -> str:
    """Name a phase, "" for the first one."""
    return f"in {end.plan.name}" if end.plan.number > 1 else ""


def _program(end: PhaseEnd) -> str:
    """Name what was started: the program, the script or the launcher."""
    if end.plan.start is not None and end.plan.start.ranks.starter is Launcher.NONE:
        return _PROGRAM
    return "the script" if end.plan.is_script else "the launcher"


def _ended(exit_code: int) -> str:
    return describe_exit(exit_code) if exit_code < 0 else f"ended with exit code {exit_code}"


def judge_generation(
    end: PhaseEnd, names: Sequence[str]
) -> tuple[Generation | None, FailureCause | None]:
    """Return what an inference program generated and what is wrong with it, if anything.

    Args:
        end: The end of its only phase.
        names: What must be there, for the run or for every request.
    """
    path = end.plan.dirs.generated
    if not path.exists():
        text = (
            f"the program ended with exit code 0, but wrote no {path}, expected its requests "
            "there; give it the path ${INFERENCE_OUTPUT_PATH}"
        )
        return None, FailureCause(text=text, see=str(end.plan.dirs.launcher_log))
    try:
        generation = read_metrics(path).generation
    except (GoldenError, MetricsError) as error:
        return None, FailureCause(text=f"the program ended with exit code 0, but {error}")
    if generation is None:
        return None, FailureCause(text=f"{path}: holds series of a training, expected requests")
    for name in names:
        if not generation.has(name):
            text = missing_metric(generation, name)
            return generation, FailureCause(text=text, see=str(path))
    return generation, None


def missing_metric(generation: Generation, name: str) -> str:
    """Say which metric is not there, and what is."""
    keys = {key for request in generation.requests.values() for key in request.content}
    found = ", ".join(sorted({*keys, *generation.content} - {"input_prompt"}))
    return f"the program wrote no {name!r} for every request, only {found}"


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


def evaluate(case: WorkloadCase | None, problem: str | None) -> tuple[str | None, bool]:
    """Return why a judged workload does not pass, and whether that was expected.

    A broken one must not be brought here.

    Args:
        case: None for a row with a script.
        problem: Why it failed, evidence included; None if it passed.
    """
    if case is None or case.evaluation is Evaluation.PASS:
        return problem, False
    if problem is None:
        text = (
            "passed, but TEST_EVALUATION is xpass, so it was expected to fail; "
            f"if that is fixed, remove TEST_EVALUATION from {case.path}"
        )
        return text, False
    pattern = case.expected_failure
    if pattern is None or re.search(pattern, problem):
        return problem, True
    return f"{problem}\nnot the failure that was expected: {pattern!r}", False

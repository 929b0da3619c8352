"""Report of workloads: progress while they run, plan, failures, further attempts, record."""

from __future__ import annotations

import contextlib
import shlex
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path

import pytest

from pytest_megatron.base.files import write_text_atomically
from pytest_megatron.base.text import counted, rough_time
from pytest_megatron.runs.headline import headline_fingerprint, make_advice
from pytest_megatron.runs.record import (
    RecordedAttempt,
    RecordedHealth,
    RecordedWorkload,
)
from pytest_megatron.runs.redact import Redactor
from pytest_megatron.session.state import NOTE_PREFIX, RunSession
from pytest_megatron.triage.rank_log import End
from pytest_megatron.workloads.golden.compare.result import name_unjudged, render, render_layers
from pytest_megatron.workloads.golden.model import MetricMap, is_loss
from pytest_megatron.workloads.training.plan.plan import ONLY_PHASE, AttemptPlan, PhasePlan
from pytest_megatron.workloads.training.run.runner import (
    AttemptListener,
    Progress,
    parse_progress,
)
from pytest_megatron.workloads.verdict.attempt import Attempt, Verdict
from pytest_megatron.workloads.verdict.compare import Judgement
from pytest_megatron.workloads.verdict.job import CheckedJob, Training, WorkloadJob
from pytest_megatron.workloads.verdict.retry import fingerprint

_INDENT = "    "
_MAX_SHOWN = 10  # metrics or gradients of one repeat
_RECORD_AGAIN = "fix the golden, or write it anew with `--golden refresh`: no run can pass"
_LINE_EVERY_S = 10.0
_NOTE_EVERY_S = 2.0  # a note is on the disk before a reader sees it
_SECOND_MS = 1000


def uncaptured(config: pytest.Config) -> contextlib.AbstractContextManager[None]:
    """Return a context in which pytest captures no output."""
    capture = config.pluginmanager.get_plugin("capturemanager")
    if capture is None:
        return contextlib.nullcontext()
    found: contextlib.AbstractContextManager[None] = capture.global_and_fixture_disabled()
    return found


class TrainingListener:
    """Passes on what a training prints, and how far it is in place of its iteration lines.

    With `-v` it passes these on as well.
    """

    def __init__(
        self,
        config: pytest.Config,
        name: str,
        write: Callable[[Sequence[str]], None],
        show: Callable[[str], None],
    ) -> None:
        """Take where lines and progress go.

        Args:
            config: Configuration of this process.
            name: Of the workload, for its progress.
            write: Takes whole lines.
            show: Takes how far it is.
        """
        self._copies_iterations = config.getoption("verbose") > 0
        self._name = name
        self._write = write
        self._show = show

    def on_lines(self, lines: list[str]) -> None:
        """Pass lines on, without those that the progress stands for."""
        shown = [x for x in lines if self._copies_iterations or parse_progress(x) is None]
        if shown:
            self._write(shown)

    def on_progress(self, phase: str, progress: Progress) -> None:
        """Pass the progress on."""
        self._show(progress_text(self._name, phase, progress))


class LiveTerminal(TrainingListener):
    """Copies the lines of tee'd ranks to the terminal, and says now and then how far it is."""

    def __init__(self, config: pytest.Config, node_id: str, *, note: Path | None) -> None:
        """Begin to show a training's progress.

        Args:
            config: Configuration of this process.
            node_id: Node id of the workload.
            note: Where a process without a terminal, a worker of pytest-xdist, notes the progress
                for the one that has it; None shows it here.
        """
        super().__init__(config, node_id.rpartition("::")[2], self._write_lines, self._show_text)
        reporter = config.pluginmanager.get_plugin("terminalreporter") if note is None else None
        self._config = config
        self._writer = None if reporter is None else reporter._tw  # pytest's plugins do this, too
        self._has_line = False
        self._next_line_at = time.monotonic() + (_LINE_EVERY_S if note is None else 0)
        self._note = note

    def close(self) -> None:
        """Remove the note."""
        if self._note is not None:
            self._note.unlink(missing_ok=True)

    def _show_text(self, text: str) -> None:
        """Show the progress, now and then."""
        if time.monotonic() < self._next_line_at:
            return
        if self._note is not None:
            self._next_line_at = time.monotonic() + _NOTE_EVERY_S
            with contextlib.suppress(OSError):  # a full disk ends a run elsewhere
                write_text_atomically(self._note, text)
        else:
            self._next_line_at = time.monotonic() + _LINE_EVERY_S
            self._write_lines([text])

    def _write_lines(self, lines: Sequence[str]) -> None:
        """Write whole lines."""
        if self._writer is None:
            return
        with uncaptured(self._config):
            if not self._has_line:
                self._writer.line()
                self._has_line = True
            for line in lines:
                self._writer.line(line)
            self._writer.flush()


class WorkersProgress:
    """Prints how far the trainings of pytest-xdist's workers are. Lives in their controller."""

    def __init__(
        self, config: pytest.Config, run_dir: Path, every_s: float = _LINE_EVERY_S
    ) -> None:
        self._config = config
        self._run_dir = run_dir
        self._every_s = every_s
        self._is_over = threading.Event()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtestloop(self) -> Generator[None, object, object]:
        """Print beside the loop, which waits for the workers."""
        thread = threading.Thread(target=self._print, daemon=True)
        thread.start()
        try:
            return (yield)
        finally:
            self._is_over.set()
            thread.join()
            for note in self._notes():
                note.unlink(missing_ok=True)

    def _notes(self) -> list[Path]:
        return sorted(self._run_dir.glob(f"{NOTE_PREFIX}*"))

    def _print(self) -> None:
        """Print a line for each training that came further since the last time."""
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        seen: set[str] = set()
        while not self._is_over.wait(self._every_s) and reporter is not None:
            texts = [_text_of(note) for note in self._notes()]
            new = [text for text in texts if text and text not in seen]
            seen = set(texts)
            if new:
                before = [""] if reporter._tw.width_of_current_line else []
                reporter._tw.write("\n".join([*before, *new, ""]), flush=True)


def _text_of(note: Path) -> str:
    """Return the text of a file, "" if it is gone."""
    try:
        return note.read_text(encoding="utf-8")
    except OSError:  # the training has ended
        return ""


def progress_text(name: str, phase: str, progress: Progress) -> str:
    """Return how far a training is, in words; short, as 80 columns have to do."""
    of_phase = "" if phase == ONLY_PHASE else f", {phase}"
    parts = [f"{name}{of_phase}: {progress.text.replace(' of ', '/')}"]
    if progress.loss is not None:
        parts.append(f"{progress.loss_name} {_rounded(progress.loss)}")
    if progress.iteration_ms is not None:
        ms = progress.iteration_ms
        parts.append(f"{ms:.0f} ms a step" if ms < _SECOND_MS else f"{ms / 1000:.1f} s a step")
    left = progress.time_left_s
    if left is not None:
        parts.append(f"{rough_time(left)} left")
    return ", ".join(parts)


def _rounded(loss: str) -> str:
    """Return a loss with four digits."""
    try:
        return f"{float(loss):.4g}"
    except ValueError:
        return loss


def training_failure(training: Training) -> str:
    """Return why a training is no good: the headline, what to do, its evidence, what was tried."""
    last = training.attempts[-1]
    assert last.cause is not None
    lines = [last.cause.text, *filter(None, [advice_on(training)])]
    lines += [f"{_INDENT}{line}" for line in last.cause.evidence]
    lines += [f"see {last.cause.see}"] if last.cause.see else []
    for attempt in training.attempts[:-1]:
        if attempt.cause is not None:
            lines.append(f"attempt {attempt.number}: {attempt.cause.text}")
    return "\n".join(lines)


def advice_on(training: Training, judgement: Judgement | None = None) -> str | None:
    """Return what to do about a failure; None where nothing is known to help."""
    cause = training.attempts[-1].cause
    signature = None if cause is None else cause.signature
    if signature is None:
        failed = () if judgement is None else judgement.failed
        is_off = any(repeat.against == "golden" for repeat in failed)
        known = training.job.table["golden_mismatch"].advice if is_off else None
        is_whole = cause is None or cause.is_after_training
        if judgement is not None and failed and judgement.is_golden_to_blame:
            known = _RECORD_AGAIN
        advice = known if is_whole or cause is None else cause.record.advice
        return None if advice is None else make_advice(advice)
    again = "transient as a rule" if signature.is_transient else "not transient, so not run again"
    again += "" if training.stopped is None else f"; not run again: {training.stopped}"
    return make_advice(signature.advice, known_as=signature.id, again=again)


def mismatch(training: Training, judgement: Judgement) -> str:
    """Return which metrics disagree, where and by how much."""
    job = training.job
    last = training.attempts[-1]
    if not judgement.failed:  # what came after the training failed
        agreed = "its metrics agree with the golden" if judgement.has_golden else "not compared"
        return f"{training_failure(training)}\n{agreed}"
    compared = {repeat.compared for repeat in judgement.failed}
    what = "metrics" if "metrics" in compared else min(compared)
    if last.cause is not None and last.ends[-1].end is End.NOT_EXITED:
        first = f"{last.cause.text}; and its {what} disagree: {judgement.in_short}"
    else:
        end = f"its {what} disagree"
        if judgement.is_golden_to_blame:
            end = "could not be compared"
        so_far = "ended with exit code 0" if judgement.is_too_short else "trained to the end"
        first = f"{judgement.in_short}: {so_far}, but {end}"
    lines = [first]
    for repeat in judgement.failed:
        if job.num_repeats > 1 or repeat.against != "golden":
            lines.append(f"repeat {repeat.repeat} against the {repeat.against}:")
        for comparison in repeat.failed[:_MAX_SHOWN]:
            lines.append(f"{_INDENT}{render(comparison)}")
            lines += (f"{_INDENT}{_INDENT}{line}" for line in render_layers(comparison))
        if len(repeat.failed) > _MAX_SHOWN:
            num_more = len(repeat.failed) - _MAX_SHOWN
            lines.append(f"{_INDENT}and {num_more} more; see {job.dirs.comparison}")
        lines.append(f"{_INDENT}measured: {repeat.measured}")
    return "\n".join([*lines, *filter(None, [advice_on(training, judgement)])])


def summary_line(
    training: Training, judgement: Judgement | None, problem: str | None = None
) -> str:
    """Return one line for the end of the run: time, loss, the headline or what was odd."""
    parts = [f"{training.duration_s:.1f} s"]
    if training.whole and training.whole[0].metrics:
        parts += _loss(training.whole[0].whole, training.job.metric_names or ())
    if training.whole and (generation := training.whole[0].generation) is not None:
        num_tokens = sum(len(r.tokens or ()) for r in generation.requests.values())
        parts.append(
            f"{counted(num_tokens, 'token')} for {counted(len(generation.requests), 'request')}"
        )
    if problem is not None:
        parts.append(problem.partition("\n")[0])
    elif training.job.workload.script is not None:
        parts.append("judged by its exit code alone")
    elif judgement is not None:
        notes = [
            f"resumed: {note}" if repeat.against == "first phase" else note
            for repeat in judgement.repeats
            for note in (
                *(note for c in repeat.comparisons if c.is_judged for note in c.notes),
                *filter(None, [name_unjudged(repeat.comparisons)]),
            )
        ]
        parts += list(dict.fromkeys(notes))
    parts += list(dict.fromkeys(a.note for a in training.attempts if a.note is not None))
    if (reason := training.job.why_not_traced) is not None:
        parts.append(f"not traced: {reason}")
    parts += [
        f"attempt {a.number} failed: {a.signature or 'unknown'}"
        for a in training.attempts[:-1]
        if a.cause is not None
    ]
    return ", ".join(parts)


def plan_text(job: WorkloadJob, plan: AttemptPlan, golden: Path | None) -> str:
    """Return what would run, for `--plan`: the words can be pasted into a shell."""
    redactor = job.redactor(plan)
    lines = [
        job.node_id,
        f"  golden: {golden if golden is not None else 'none'}",
        f"  ranks: {plan.world_size} on {job.workload.platform}",
        f"  time limit: {plan.time_limit_s:g} s",
        f"  repeats: {job.num_repeats}, each with up to {job.retry.max_attempts} attempts",
        f"  directory: {plan.cwd}",
    ]
    if job.gradient_tolerance is not None:
        lines.append(f"  tolerance of gradients: {job.gradient_tolerance:.1e} of the norm")
    for phase in plan.phases:
        lines += _phase_lines(redactor, phase)
    if plan.script is not None:
        lines += [f"  | {line}" for line in redactor.text(plan.script).splitlines()]
    return "\n".join(lines)


def _phase_lines(redactor: Redactor, phase: PhasePlan) -> list[str]:
    """Return what `--plan` prints of a phase."""
    lines: list[str] = []
    if (origin := phase.origin) is not None:
        is_frozen = origin.view is not None
        place = f" in {origin.checkpoints}" if is_frozen else ""
        back = "from" if is_frozen else "back to"
        lines.append(f"  then {back} iteration {origin.back_to}{place}, and")
    elif phase.number > 1:
        lines.append(f"  then as {phase.name} says, and")
    lines += [f"  starts from: {path}" for path in phase.frozen_paths]
    env = redactor.env(phase.own_env)
    lines += _script_lines("BEFORE_SCRIPT", phase.before_script, redactor)
    lines += [f"  {name}={shlex.quote(value)} \\" for name, value in env.items()]
    lines.append(f"  {shlex.join(redactor.words(phase.argv))}")
    return lines + _script_lines("AFTER_SCRIPT", phase.after_script, redactor)


def _script_lines(key: str, script: str | None, redactor: Redactor) -> list[str]:
    """Return the lines of a script under a heading."""
    if script is None:
        return []
    return [f"  {key}:", *(f"  | {line}" for line in redactor.text(script).splitlines())]


def _loss(metrics: MetricMap, names: Sequence[str]) -> Sequence[str]:
    """Describe the first and the last loss, if the metrics have one."""
    name = next((name for name in ("lm loss", *names) if is_loss(name) and name in metrics), "")
    series = metrics.get(name)
    if series is None or not len(series):
        return []
    first, last = series.values[0], series.values[-1]
    if isinstance(first, str) or isinstance(last, str):
        return []
    return [f"{name} {first:.4f} -> {last:.4f} in {series.steps[-1]} iterations"]


def item_record(
    training: Training,
    judgement: Judgement | None,
    *,
    verdict: Verdict | None = None,
    problem: str | None = None,
    is_expected: bool = False,
    is_uncompared: bool = False,
) -> RecordedWorkload:
    """Return the record of a workload.

    Args:
        training: What ran.
        judgement: The comparisons, or None where there were none.
        verdict: The last word; None takes the training's own.
        problem: Why it did not pass, as printed.
        is_expected: Whether the problem is what the case expects, which passes.
        is_uncompared: Whether the user asked for no comparison with a golden.
    """
    summary = summary_line(training, judgement, problem)
    if is_uncompared and problem is None:
        summary = f"{summary}, not compared with a golden"
    compared = judgement if judgement is not None and judgement.has_golden else None
    return RecordedWorkload(
        verdict=(verdict or training.verdict).value,
        problem=problem,
        advice=None if problem is None else advice_on(training, judgement),
        is_expected=is_expected,
        summary=f"failed as expected: {summary}" if is_expected else summary,
        duration_s=round(training.duration_s, 3),
        directory=str(training.job.dirs.root),
        compared=compared is not None,
        policy=None if compared is None else compared.policy.as_json(),
        not_run_again=training.stopped,
        fingerprint=_fingerprint(training, judgement) if problem is not None else None,
        platform=training.job.workload.platform,
        attempts=tuple(_attempt_record(attempt) for attempt in training.attempts),
    )


def _fingerprint(training: Training, judgement: Judgement | None) -> str:
    """Return what two failures of a workload have in common that failed in the same way.

    Of a cause, what triage says of it; of a mismatch, the metrics that disagree.
    """
    cause = training.attempts[-1].cause
    if cause is not None and judgement is None:
        found = cause.diagnosis
        return headline_fingerprint(cause.text) if found is None else found.record.fingerprint
    repeats = () if judgement is None else judgement.failed
    names = sorted({f"{r.against}: {c.metric}" for r in repeats for c in r.failed})
    return f"mismatch|{', '.join(names)}" if names else "not as expected"


def _attempt_record(attempt: Attempt) -> RecordedAttempt:
    """Return an attempt for run.json."""
    cause, health = attempt.cause, attempt.health
    faults = () if health is None else tuple(fault.text for fault in health.faults)
    return RecordedAttempt(
        repeat=attempt.repeat,
        attempt=attempt.number,
        directory=str(attempt.dirs.root),
        duration_s=round(attempt.duration_s, 3),
        exit_codes=tuple(end.returncode for end in attempt.ends),
        num_left=sum(end.num_left for end in attempt.ends),
        cause=None if cause is None else cause.text,
        root_rank=None if cause is None else cause.rank,
        signature=attempt.signature,
        is_transient=cause is not None and cause.is_transient,
        health=None if health is None else RecordedHealth(faults=faults, notes=health.notes),
        fingerprint=None if cause is None else fingerprint(cause),
        note=attempt.note,
    )


def print_summary(
    reporter: pytest.TerminalReporter,
    records: Mapping[str, RecordedWorkload],
    goldens: Sequence[str],
    shorten: Callable[[str], str],
) -> None:
    """Print a line for each workload that ran, then the lines about goldens."""
    if records:
        reporter.section("workloads", sep="-")
    for node_id, record in records.items():
        other = "yellow" if record.is_held else "red"
        colour = {"passed": "green", "flaky": "yellow"}.get(record.verdict, other)
        reporter.write(f"{record.verdict:<7}", **{colour: True})
        reporter.write(shorten(f" {node_id}  {record.summary}\n"))
    for line in goldens:
        reporter.write_line(shorten(line))


def show_findings(session: RunSession, checked: CheckedJob, listener: AttemptListener) -> None:
    """Show the warnings about a job that this session has not shown yet.

    Nothing is shown of a job with an error, which is to be refused.
    """
    if any(finding.is_error for finding in checked.findings):
        return
    lines = [f"megatron: {session.shorten(finding.line)}" for finding in checked.findings]
    new = [line for line in dict.fromkeys(lines) if line not in session.warned]
    session.warned.update(new)
    if new:
        listener.on_lines(new)


class ItemRetries:
    """Grants further attempts of one item from the run's budget, and prints them."""

    def __init__(self, session: RunSession, listener: AttemptListener) -> None:
        self._session = session
        self._live = listener

    def claim(self, attempt: Attempt) -> str | None:
        """Take a further attempt from the run's budget."""
        del attempt
        return self._session.retries.claim()

    def on_retry(self, attempt: Attempt, pause_s: float) -> None:
        """Print why a workload is tried again, and when."""
        assert attempt.cause is not None
        when = f"in {pause_s:.1f} s" if pause_s else "at once"
        why = f"known as {attempt.signature}, which is transient"
        text = f"attempt {attempt.number}: {attempt.cause.text}; again {when}: {why}"
        self._live.on_lines([self._session.shorten(text)])

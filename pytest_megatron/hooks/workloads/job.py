"""From an item and the options to a job: what exactly is trained, and what it is compared with."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

from pytest_megatron.ci.jobs import num_repeats_of
from pytest_megatron.errors import GoldenError, LaunchError
from pytest_megatron.golden.policy import ComparedWorkload, ComparisonPolicy
from pytest_megatron.golden.provenance import Golden
from pytest_megatron.golden.store import golden_path, new_golden_path, read_golden
from pytest_megatron.hooks.options import MIN_REFRESH_REPEATS, Options
from pytest_megatron.hooks.session import RunSession
from pytest_megatron.recipe.case import Evaluation
from pytest_megatron.recipe.model import Workload
from pytest_megatron.refresh.read import digest_of
from pytest_megatron.verdict.attempt import Attempt, Verdict
from pytest_megatron.verdict.compare import check_golden_kind
from pytest_megatron.verdict.job import CheckedJob, JobOptions, Training, WorkloadJob, make_job
from pytest_megatron.workload.plan.plan import Replay
from pytest_megatron.workload.run.runner import AttemptListener


def make_item_job(session: RunSession, workload: Workload, node_id: str) -> CheckedJob:
    """Make the job of an item from the options of the session.

    Raises:
        MegatronError: As from `make_job`; or a variable of a replay is no number.
    """
    options, facts = session.options, session.facts
    num_repeats = _num_repeats(options, workload)
    if options.is_writing_goldens:
        num_repeats = max(num_repeats, MIN_REFRESH_REPEATS)
    job_options = JobOptions(
        root=session.root,
        run_dir=session.run_dir,
        env=os.environ if options.decision is None else {**os.environ, **options.decision.env},
        project=session.project,
        is_lightweight=options.is_lightweight,
        host=None if session.engine.is_queue else facts.host,
        tee_ranks=options.tee_ranks,
        max_attempts=options.max_attempts,
        backoff_s=options.retry_backoff_s,
        table=session.table,
        replay=Replay.of(os.environ),
    )
    return make_job(job_options, session.engine, workload, node_id, num_repeats=num_repeats)


def _num_repeats(options: Options, workload: Workload) -> int:
    """Return how often a workload is trained: what is typed wins, then labels, then the recipe."""
    if options.num_repeats is None and options.decision is not None:
        return num_repeats_of(workload, options.decision)
    return options.num_repeats or workload.n_repeat or 1


def golden_path_of(job: WorkloadJob) -> Path:
    """Return where the golden of a job is, or would be."""
    return golden_path(job.setting.root, job.workload)


def new_golden_path_of(job: WorkloadJob) -> Path:
    """Return where a new golden of a job is written."""
    return new_golden_path(job.setting.root, job.workload)


def require_golden(session: RunSession, job: WorkloadJob, policy: ComparisonPolicy) -> None:
    """Make sure, before a training costs anything, that there is something to compare it with.

    Raises:
        GoldenError: The golden should be there and is not, cannot be read, or the policy judges
            no metric of the workload.
    """
    mode = session.options.golden
    if not job.is_compared or mode in ("off", "refresh"):
        return
    path = golden_path_of(job)
    if not path.exists():
        is_to_fail = job.case is not None and job.case.evaluation is Evaluation.XPASS
        if mode == "record" or is_to_fail:
            return
        raise GoldenError(
            job.node_id,
            f"no golden, nothing was run; expected {session.shorten(str(path))}; write one with "
            f"`--golden record`, or run without comparing with `--golden off`",
        )
    golden = read_golden(path)
    if job.case is not None:
        check_golden_kind(job.case, golden)
    policy.at(ComparedWorkload.of(job.workload)).require_judged(job.metric_names or ())


def keep_golden(session: RunSession, job: WorkloadJob) -> str | None:
    """Copy the golden into the workload's directory; return its SHA-256, None where there is none.

    The copy is what the run is compared with and what its page shows, whatever becomes of the
    golden while the training runs. A run that is taken over has the copy already.

    Raises:
        LaunchError: It cannot be copied.
    """
    path = golden_path_of(job)
    if not job.is_compared or session.options.golden == "off":
        return None
    try:
        if path.is_file() and not (session.options.is_attached and job.dirs.golden.is_file()):
            shutil.copyfile(path, job.dirs.golden)
        return digest_of(job.dirs.golden) if job.dirs.golden.is_file() else None
    except OSError as error:
        raise LaunchError(
            str(job.dirs.golden),
            f"{error.strerror}; give another --run-dir, or make room; nothing was run",
        ) from error


def read_kept_golden(session: RunSession, job: WorkloadJob, digest: str | None) -> Golden | None:
    """Return the golden as it was before the training; None where nothing is to be compared.

    Args:
        session: Of the run.
        job: Whose golden it is.
        digest: As `keep_golden` returned it.

    Raises:
        GoldenError: The copy is not what was kept, or cannot be read.
    """
    if digest is None or session.options.golden == "refresh":
        return None
    copy = job.dirs.golden
    if not copy.is_file() or digest_of(copy) != digest:
        raise GoldenError(
            str(copy),
            "changed while the training ran, so what was measured is not judged; leave the run "
            "directory alone, and run it again",
        )
    return replace(read_golden(copy), path=str(golden_path_of(job)))


def show_findings(
    session: RunSession, checked: CheckedJob, listener: AttemptListener
) -> CheckedJob:
    """Show the warnings about a job that this session has not shown yet; return the job.

    A job with an error is returned as it is, to be refused. In a run that is taken over it is in
    the queue already: errors that the engine found are only shown.
    """
    is_attached = session.options.is_attached
    if any(finding.is_error for finding in checked.findings) and not is_attached:
        return checked
    lines = [f"megatron: {session.shorten(finding.line)}" for finding in checked.findings]
    new = [line for line in dict.fromkeys(lines) if line not in session.warned]
    session.warned.update(new)
    if new:
        listener.on_lines(new)
    return checked.without_engine_findings() if is_attached else checked


class ItemRetries:
    """Grants further attempts of one item from the run's budget, and prints them."""

    def __init__(self, session: RunSession, node_id: str, live: AttemptListener) -> None:
        self._session = session
        self._node_id = node_id
        self._live = live

    def claim(self, attempt: Attempt) -> str | None:
        """Take a further attempt from what the run may have."""
        signature = _signature_of(attempt) or ""
        return self._session.retry_budget.claim(self._node_id, signature, attempt.suspects)

    def on_retry(self, attempt: Attempt, pause_s: float) -> None:
        """Print why, and when."""
        assert attempt.cause is not None
        when = f"in {pause_s:g} s" if pause_s else "at once"
        text = f"attempt {attempt.number}: {attempt.cause.text}; again {when}"
        self._live.on_lines([self._session.shorten(text)])

    def note_end(self, training: Training) -> None:
        """Count the item, and print a line if machine or network fail the whole run."""
        is_broken = training.verdict is Verdict.BROKEN
        broken_by = _signature_of(training.attempts[-1]) if is_broken else None
        if text := self._session.retry_budget.note_end(self._node_id, broken_by):
            self._live.on_lines([f"megatron: {text}"])


def _signature_of(attempt: Attempt) -> str | None:
    """Return the id of what an attempt failed of."""
    signature = None if attempt.cause is None else attempt.cause.signature
    return None if signature is None else signature.id

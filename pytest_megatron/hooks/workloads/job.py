"""The job of an item: findings of the checks about it, and further attempts of it."""

from __future__ import annotations

import os

from pytest_megatron.hooks.options import MIN_REFRESH_REPEATS, Options
from pytest_megatron.hooks.session import RunSession
from pytest_megatron.recipe.model import Workload
from pytest_megatron.verdict.attempt import Attempt, Verdict
from pytest_megatron.verdict.job import CheckedJob, JobOptions, Training, make_job
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
    """Return the number of repeats of a workload: the option wins, then labels, then the recipe."""
    if options.num_repeats is None and options.decision is not None:
        return options.decision.num_repeats(workload.n_repeat)
    return options.num_repeats or workload.n_repeat or 1


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
        """Take a further attempt from the run's budget."""
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
    """Return the id of the signature of a failed attempt."""
    signature = None if attempt.cause is None else attempt.cause.signature
    return None if signature is None else signature.id

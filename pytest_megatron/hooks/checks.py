"""Shows what the checks of workloads found: under a plan, and once for a run."""

from __future__ import annotations

from pytest_megatron.checks.check import problem_of
from pytest_megatron.checks.rules import CheckFinding
from pytest_megatron.engines.base import Checking
from pytest_megatron.errors import LaunchError
from pytest_megatron.hooks.session import RunSession
from pytest_megatron.launch.local import AttemptListener
from pytest_megatron.verdict.checked import check_job
from pytest_megatron.verdict.job import WorkloadJob, plan_job
from pytest_megatron.verdict.training import needs_of


def checked(session: RunSession, job: WorkloadJob) -> tuple[CheckFinding, ...]:
    """Return what is wrong with a job, where it is to run.

    Raises:
        MegatronError: It cannot be planned.
    """
    engine = session.engine
    # The GPUs that are here count where it runs here.
    gpus = () if engine.is_queue else session.facts.host.fitting(job.workload.platform)
    found = check_job(job, memory_bytes=min((gpu.memory_bytes for gpu in gpus), default=None))
    if isinstance(engine, Checking):
        needed = needs_of(job.workload, plan_job(job))
        found += tuple(engine.findings(job.workload, job.setting, needed))
    return found


def refuse_or_warn(session: RunSession, job: WorkloadJob, listener: AttemptListener) -> None:
    """Show the warnings about a job that this session has not shown yet.

    A run that is taken over has its jobs in the queue already: errors are only shown then.

    Raises:
        LaunchError: A check finds an error, and nothing of the job may start.
    """
    found = checked(session, job)
    problem = problem_of(found)
    if problem is not None and not session.options.is_attached:
        raise LaunchError(*problem)
    lines = [f"megatron: {session.shorten(finding.line)}" for finding in found]
    new = [line for line in dict.fromkeys(lines) if line not in session.warned]
    session.warned.update(new)
    if new:
        listener.on_lines(new)

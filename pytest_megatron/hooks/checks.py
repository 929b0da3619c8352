"""Shows what the checks of workloads found: under a plan, and once for a run."""

from __future__ import annotations

from collections.abc import Iterable

from pytest_megatron.checks.rules import Finding
from pytest_megatron.hooks.session import RunSession
from pytest_megatron.launch.local import Listener
from pytest_megatron.verdict.checked import check_job
from pytest_megatron.verdict.job import Job


def checked(session: RunSession, job: Job) -> tuple[Finding, ...]:
    """Return what is wrong with a job, on the GPUs that are here where it will run here."""
    is_here = session.engine.name == "local"
    gpus = session.facts.host.fitting(job.workload.platform) if is_here else ()
    return check_job(job, memory_bytes=min((gpu.memory_bytes for gpu in gpus), default=None))


def warn_once(session: RunSession, job: Job, listener: Listener) -> None:
    """Show the warnings about a job that this session has not shown yet."""
    found = [line for line in finding_lines(checked(session, job)) if line.startswith("warning")]
    new = [line for line in dict.fromkeys(found) if line not in session.warned]
    session.warned.update(new)
    if new:
        listener.on_lines([f"megatron: {session.shorten(line)}" for line in new])


def finding_lines(findings: Iterable[Finding]) -> list[str]:
    """Return findings as lines of a terminal."""
    return [
        f"{found.severity.value}: {found.where}: {found.text}"
        if found.where
        else f"{found.severity.value}: {found.text}"
        for found in findings
    ]

"""What the checks say of a job, before anything of it is started or submitted. Pure."""

from __future__ import annotations

from pytest_megatron.checks.check import findings_of, hits_of, problem_of
from pytest_megatron.checks.rules import CheckFinding
from pytest_megatron.errors import LaunchError
from pytest_megatron.verdict.job import WorkloadJob


def check_job(job: WorkloadJob, *, memory_bytes: int | None = None) -> tuple[CheckFinding, ...]:
    """Return what is wrong with a job, errors first.

    Args:
        job: What is to run.
        memory_bytes: Of a GPU that it will run on, where one is known.
    """
    if job.case is None:
        return ()
    return findings_of(hits_of(job.workload, job.case, job.setting.env, memory_bytes=memory_bytes))


def refuse_wrong(job: WorkloadJob) -> None:
    """Refuse a job that cannot train, whatever it runs on.

    Raises:
        LaunchError: A check finds an error; says all of them.
    """
    problem = problem_of(check_job(job))
    if problem is not None:
        raise LaunchError(*problem)

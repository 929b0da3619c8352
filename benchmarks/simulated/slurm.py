"""Slurm's commands over a cluster that is not there: the engine's own protocol, `SlurmCommands`.

What sbatch is given is read as Slurm reads it (`--exclude`, script, argument). A job ends by
leaving what the worker would have left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

from pytest_megatron.engines.slurm.states import SlurmJob
from pytest_megatron.engines.slurm.submit import JobScript, SlurmRefusedError
from pytest_megatron.workloads.engine.api import Resources
from pytest_megatron.workloads.recipe.model import Workload
from pytest_megatron.workloads.training.plan.plan import Setting
from simulated.cluster import Cluster, Shape, SimulatedJob, State

_EPOCH = datetime(2026, 1, 1)  # noqa: DTZ001 - Slurm prints times without a zone
_KEPT_S = 300.0  # how long Slurm remembers a job that has ended, by default
_SLACK_S = 600.0  # that a job may take longer than its training


class SimulatedScripts:
    """One script for each shape of job; nobody ever runs it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.needs: dict[str, Resources] = {}

    def settle(self, setting: Setting, _workload: Workload) -> Setting:
        """Return the setting as it is."""
        return setting

    def describe(self, _needed: Resources) -> list[str]:
        """Show nothing."""
        return []

    def write(self, wanted: Sequence[Resources]) -> dict[Resources, JobScript]:
        """Name a script for each."""
        found = {}
        for needed in wanted:
            path = self._directory / f"{len(self.needs)}.sh"
            self.needs[str(path)] = needed
            found[needed] = JobScript(path=path)
        return found


class SimulatedSlurm:
    """The commands.

    Attributes:
        num_queries: How often `jobs` was asked.
        num_submissions: How often `submit` was.
    """

    def __init__(
        self, cluster: Cluster, scripts: SimulatedScripts, key_of: Callable[[Path], str]
    ) -> None:
        """Take the cluster, what its jobs need, and what tells the order of a spec's file."""
        self._cluster = cluster
        self._scripts = scripts
        self._key_of = key_of
        self._numbers: dict[int, int] = {}
        self._seen: dict[int, SlurmJob] = {}
        self._next_id = 1
        self.num_queries = self.num_submissions = 0

    def submit(self, words: Sequence[str]) -> int:
        """Put a job into the queue.

        Raises:
            SlurmRefusedError: There are not so many nodes.
        """
        self.num_submissions += 1
        *flags, script, argument = words
        given = dict(word.lstrip("-").partition("=")[::2] for word in flags)
        needed = self._scripts.needs[script]
        shape = Shape(
            num_nodes=needed.num_nodes,
            gpus=needed.gpus_per_node,
            limit_s=needed.time_limit_s + _SLACK_S,
            excluded=frozenset(filter(None, given.get("exclude", "").split(","))),
        )
        if len(frozenset(self._cluster.nodes) - shape.excluded) < shape.num_nodes:
            raise SlurmRefusedError("Requested node configuration is not available")
        job_id, self._next_id = self._next_id, self._next_id + 1
        job = self._cluster.submit(self._key_of(Path(argument)), shape)
        self._numbers[job_id] = job.number
        self._seen[job.number] = SlurmJob(job_id=job_id, state="PENDING", name=given["job-name"])
        return job_id

    def jobs(self) -> tuple[SlurmJob, ...]:
        """Return all jobs that Slurm remembers."""
        self.num_queries += 1
        for job in list(self._cluster.jobs()):
            if job.ended is not None and self._cluster.now - job.ended > _KEPT_S:
                self._cluster.forget(job.number)
                seen = self._seen.pop(job.number)
                del self._numbers[seen.job_id]
        return tuple(self._said(job) for job in self._cluster.jobs())

    def cancel(self, ids: Sequence[int]) -> None:
        """End jobs."""
        for job_id in ids:
            if job_id in self._numbers:
                self._cluster.cancel(self._numbers[job_id])

    def _said(self, job: SimulatedJob) -> SlurmJob:
        """Return what squeue prints of a job."""
        seen = self._seen[job.number]
        if seen.state == job.state.value:
            return seen
        start = None if job.started is None else _EPOCH + timedelta(seconds=job.started)
        self._seen[job.number] = found = replace(
            seen,
            state=job.state.value,
            reason="Resources" if job.state is State.PENDING else "",
            exit_status=1 << 8 if job.state is State.FAILED else 0,
            start=start,
            nodes=",".join(job.nodes),
        )
        return found

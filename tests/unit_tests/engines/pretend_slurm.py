"""A cluster in memory: what the engine asked of it, and what it is to answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from pytest_megatron.engines.slurm.states import SlurmJob
from pytest_megatron.engines.slurm.submit import SlurmAwayError


@dataclass
class PretendSlurm:
    """Commands of Slurm without Slurm.

    Attributes:
        table: What squeue says.
        submissions: The words of every sbatch.
        cancelled: The words of every scancel.
        answers: What comes of the next calls of sbatch: None is an id, Slurm's answer by default.
        loses: Whether a submission that is not answered is lost, too.
        is_away: Whether nobody answers.
    """

    table: dict[int, SlurmJob] = field(default_factory=dict)
    submissions: list[list[str]] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    answers: list[BaseException | None] = field(default_factory=list)
    loses: bool = False
    is_away: bool = False
    ends_what_is_cancelled: bool = True
    now: float = 0.0

    def submit(self, words: Sequence[str]) -> int:
        self.submissions.append(list(words))
        answer = self.answers.pop(0) if self.answers else None
        if answer is not None and (self.loses or not isinstance(answer, SlurmAwayError)):
            raise answer
        given = dict(word.removeprefix("--").partition("=")[::2] for word in words)
        job_id = 1 + max(self.table, default=40)
        self.table[job_id] = SlurmJob(job_id=job_id, state="PENDING", name=given["job-name"])
        if answer is not None:
            raise answer
        return job_id

    def jobs(self) -> tuple[SlurmJob, ...]:
        self._require_answer()
        return tuple(self.table.values())

    def cancel(self, ids: Sequence[int]) -> None:
        self.cancelled += ids
        for job_id in ids:
            job = self.table[job_id]
            if self.ends_what_is_cancelled and job.state in ("PENDING", "RUNNING"):
                self.table[job_id] = replace(job, state="CANCELLED")

    def _require_answer(self) -> None:
        if self.is_away:
            raise SlurmAwayError("Unable to contact slurm controller")

    def set(self, job_id: int, state: str, **changes: object) -> None:
        """Change what squeue says of a job."""
        self.table[job_id] = replace(self.table[job_id], state=state, **changes)  # type: ignore[arg-type] # fields of a job

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds

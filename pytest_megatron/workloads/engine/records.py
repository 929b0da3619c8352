"""Files that a job reads and writes: `SPEC.json` and an outcome.

A spec holds the plan without the environment that the controller has: a job has its own. It can
hold what a case sets, and so is readable by its owner only.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from pytest_megatron.base.files import parse_json, read_bytes, write_json_atomically
from pytest_megatron.base.schema import SchemaError, adapter, parse
from pytest_megatron.errors import LaunchError
from pytest_megatron.runs.environment import SessionFacts
from pytest_megatron.workloads.engine.api import (
    Planned,
    SubmissionOutcome,
)
from pytest_megatron.workloads.training.plan.plan import AttemptPlan, PhasePlan
from pytest_megatron.workloads.training.run.runner import PhaseEnd


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """Specification of a job.

    Attributes:
        key: The submission's.
        outcome: The file that the job leaves.
        root: The project.
        description: The content of `plan.json`, as JSON.
        env: Variables of the engine's configuration, over the job's own and under the plan's.
        watches_gpus: Whether the job asks its GPUs how they are.
        losses: Names of the losses that end the training once one of them is not finite.
        options: For the engine's own programs.
    """

    key: str
    plan: AttemptPlan
    outcome: Path
    root: Path
    description: str
    env: dict[str, str]
    watches_gpus: bool
    losses: tuple[str, ...] = ()
    options: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord(SubmissionOutcome):
    """Outcome that a job writes when it ends.

    Attributes:
        job_id: The scheduler's, or "".
        num_restarts: How often the scheduler started it again.
        started, ended: Seconds since 1970.
    """

    key: str
    job_id: str = ""
    num_restarts: int = 0
    started: float = 0.0
    ended: float = 0.0


def write_spec(path: Path, spec: JobSpec) -> None:
    """Write a spec for its owner's eyes; the plan's inherited environment is left out.

    Raises:
        OSError: It cannot be written.
    """
    phases = tuple(replace(phase, env={}) for phase in spec.plan.phases)
    bare = replace(spec, plan=replace(spec.plan, phases=phases))
    partial = path.with_suffix(".partial")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(adapter(JobSpec).dump_json(bare))
    partial.replace(path)


def read_spec(path: Path) -> JobSpec:
    """Read the spec of a job.

    Raises:
        LaunchError: It is missing, or no spec.
    """
    try:
        return parse(JobSpec, read_bytes(path))
    except OSError as error:
        raise LaunchError(
            str(path),
            f"{error.strerror}; the job must see the run directory of the controller under the "
            f"same path, so it belongs on a shared file system",
        ) from error
    except SchemaError as error:
        raise LaunchError(
            str(path),
            f"is no spec of this version: {error.problems[0].in_output}; the job must have the "
            f"same pytest-megatron as the controller",
        ) from error


def write_record(path: Path, record: JobRecord) -> None:
    """Write the record of a job atomically.

    Raises:
        OSError: It cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    bare = replace(record, ends=tuple(map(_without_secrets, record.ends)))
    write_json_atomically(path, parse_json(adapter(JobRecord).dump_json(bare)))


def _without_secrets(end: PhaseEnd) -> PhaseEnd:
    """Return an end without all that its phase was started with, which the controller has."""
    plan = end.plan
    number, dirs = plan.number, plan.dirs
    plan = PhasePlan(number=number, dirs=dirs, argv=(), env={}, own_env={}, last_iteration=None)
    script = None if end.script is None else replace(end.script, env={})
    return replace(end, plan=plan, script=script)


def read_record(path: Path) -> JobRecord | None:
    """Read the record of a job; None where there is no such file yet.

    Raises:
        LaunchError: The file is no record.
    """
    try:
        return parse(JobRecord, read_bytes(path))
    except FileNotFoundError:
        return None
    except (OSError, SchemaError) as error:
        raise LaunchError(str(path), f"cannot be read as the outcome of a job: {error}") from error


def outcome_of(record: JobRecord, planned: Planned, controller: SessionFacts) -> SubmissionOutcome:
    """Return what the controller makes of a job's record.

    Args:
        record: The job's.
        planned: What the job carried out.
        controller: Its checkout counts where the job's cannot be read.
    """
    phases, facts = {phase.number: phase for phase in planned.plan.phases}, record.facts
    if facts is not None:
        known = controller if facts.commit is None else facts
        facts = replace(
            facts,
            commit=known.commit,
            edited=known.edited,
            new=controller.new,
            is_dirty=controller.is_dirty,
        )
    return SubmissionOutcome(
        ends=tuple(replace(end, plan=phases[end.plan.number]) for end in record.ends),
        health=record.health,
        facts=facts,
        hosts=record.hosts,
        trouble=record.trouble,
    )

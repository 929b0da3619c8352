"""Files that a job reads and writes: `SPEC.json` and an outcome.

A spec holds the plan without the environment that the controller has: a job has its own. It can
hold what a case sets, and so is readable by its owner only.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Self

from pytest_megatron.base.files import JsonValue, parse_json, read_bytes, write_json_atomically
from pytest_megatron.base.schema import SchemaError, adapter, parse, validate
from pytest_megatron.errors import LaunchError
from pytest_megatron.runs.environment import SessionFacts
from pytest_megatron.workloads.engine.api import (
    Planned,
    SubmissionOutcome,
    SubmissionResult,
)
from pytest_megatron.workloads.training.plan.plan import AttemptPlan
from pytest_megatron.workloads.training.run.runner import PhaseEnd, PhaseResult


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


_RESULT = tuple(field.name for field in fields(PhaseResult))
_SUBMISSION = tuple(field.name for field in fields(SubmissionResult))


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRecord(PhaseResult):
    """End of a phase without its plan, which the controller has."""

    number: int

    @classmethod
    def of(cls, end: PhaseEnd) -> Self:
        """Return the record of an end, without the environment that a script left."""
        script = None if end.script is None else replace(end.script, env={})
        result = {name: getattr(end, name) for name in _RESULT}
        return cls(number=end.plan.number, **{**result, "script": script})


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord(SubmissionResult):
    """Outcome that a job writes when it ends.

    Attributes:
        job_id: The scheduler's, or "".
        num_restarts: How often the scheduler started it again.
        started, ended: Seconds since 1970.
    """

    key: str
    ends: tuple[EndRecord, ...]
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


def of_start(spec: JobSpec, number: int) -> JobSpec:
    """Return what the n-th start of a submitted script carries out, with files of its own.

    All paths of an attempt begin with its directory, wherever in the plan they are.
    """
    if number == 1:
        return spec
    first = spec.plan.dirs.root
    own = first.with_name(f"attempt_{number}")
    plan = _moved(adapter(AttemptPlan).dump_python(spec.plan, mode="json"), str(first), str(own))
    return replace(
        spec,
        plan=validate(AttemptPlan, plan),
        description=json.dumps(_moved(json.loads(spec.description), str(first), str(own))),
        outcome=spec.outcome.with_stem(f"{spec.outcome.stem}-{number}"),
        key=f"{spec.key.rpartition('/')[0]}/{own.name}",
    )


def _moved(value: JsonValue, old: str, new: str) -> JsonValue:
    """Return data in which what lay in one directory lies in another."""
    if isinstance(value, dict):
        return {name: _moved(one, old, new) for name, one in value.items()}
    if isinstance(value, list):
        return [_moved(one, old, new) for one in value]
    return value.replace(old, new) if isinstance(value, str) else value


def write_record(path: Path, record: JobRecord) -> None:
    """Write the record of a job atomically.

    Raises:
        OSError: It cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json_atomically(path, parse_json(adapter(JobRecord).dump_json(record)))


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
    outcome = SubmissionOutcome(
        ends=_with_plans(record.ends, planned.plan),
        **{name: getattr(record, name) for name in _SUBMISSION},
    )
    if record.facts is None:
        return outcome
    known = controller if record.facts.commit is None else record.facts
    facts = replace(
        record.facts,
        commit=known.commit,
        edited=known.edited,
        new=controller.new,
        is_dirty=controller.is_dirty,
    )
    return replace(outcome, facts=facts)


def _with_plans(ends: Sequence[EndRecord], plan: AttemptPlan) -> tuple[PhaseEnd, ...]:
    """Return the ends of phases with their plans."""
    phases = {phase.number: phase for phase in plan.phases}
    return tuple(
        PhaseEnd(plan=phases[end.number], **{name: getattr(end, name) for name in _RESULT})
        for end in ends
    )

"""Carries out one attempt inside the job of an engine.

Started as `python -m pytest_megatron.engines.worker SPEC`. The environment is the job's, under the
plan's own variables. It leaves the attempt's files as a local run does, and at the end the file
that the spec names, whole or not at all; what kept it from running anything it also prints. The
exit code is 0 if every phase was clean, 1 if not, 2 if the spec cannot be read.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType

from pytest_megatron.engines.multitask.step import Step, watches
from pytest_megatron.errors import LaunchError, MegatronError
from pytest_megatron.gpu.health import Health, HealthWatch, merge_health
from pytest_megatron.runs.environment import gather_facts
from pytest_megatron.workloads.engine.api import EngineError, TroubleKind
from pytest_megatron.workloads.engine.records import (
    JobRecord,
    JobSpec,
    read_spec,
    write_record,
)
from pytest_megatron.workloads.training.plan.plan import AttemptPlan, inherited
from pytest_megatron.workloads.training.run.runner import (
    ForwardingListener,
    PhaseEnd,
    StartPhase,
    run_attempt,
)
from pytest_megatron.workloads.verdict.driver import FiniteLosses


class ToldToEndError(BaseException):
    """The job is to end; everything that runs in it is ended on the way out."""


class SecondStartError(Exception):
    """The scheduler has started the job before, and what that left must not be mixed up."""


def main(arguments: list[str]) -> int:
    """Run the attempt that the spec on the command line describes."""
    try:
        spec = read_spec(Path(arguments[0]))
        step = Step.of(spec, os.environ)
    except LaunchError as error:
        _say(str(error))
        return 2
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)
    if step is not None and step.place.task > 0:
        return _serve(spec, step)
    return run(spec, step)


def _serve(spec: JobSpec, step: Step) -> int:
    """Run what task 0 wants of another task; return the exit code, which ends the step if not 0."""
    has_gpus = spec.watches_gpus and watches(step.place, os.environ)
    try:
        step.serve(os.environ, gather_facts(spec.root).host.gpus if has_gpus else ())
    except ToldToEndError:
        return 1
    except OSError as error:
        _say(f"task {step.place.task}: {error.filename}: {error.strerror}")
        return 1
    return 0


def run(spec: JobSpec, step: Step | None) -> int:
    """Carry out a spec, with other tasks or alone, and write its record; return the exit code."""
    started, is_second = time.time(), False
    facts = gather_facts(spec.root)  # before anything can change the tree
    ends: tuple[PhaseEnd, ...] = ()
    health: Health | None = None
    trouble: EngineError | None = None
    host = socket.gethostname()
    try:
        ends, health = _carry_out(spec, None) if step is None else _lead(spec, step)
    except SecondStartError as second:
        trouble, is_second = EngineError(kind=TroubleKind.REQUEUED, text=str(second)), True
    except ToldToEndError as told:
        trouble = EngineError(kind=TroubleKind.CANCELLED, text=f"{told} on {host}")
    except MegatronError as error:
        trouble = EngineError(kind=TroubleKind.NOT_STARTED, text=str(error))
    except OSError as error:
        where = error.filename or spec.plan.dirs.root
        trouble = EngineError(
            kind=TroubleKind.NOT_STARTED, text=f"{where}: {error.strerror or error}"
        )
    record = JobRecord(
        key=spec.key,
        ends=ends,
        health=health,
        facts=facts,
        hosts=(os.environ.get("SLURMD_NODENAME", host),) if step is None else step.place.hosts,
        trouble=trouble,
        job_id=os.environ.get("SLURM_JOB_ID", ""),
        num_restarts=int(os.environ.get("SLURM_RESTART_COUNT", "0")),
        started=started,
        ended=time.time(),
    )
    if not (is_second and spec.outcome.exists()):  # which says how the first start ended
        write_record(spec.outcome, record)
    if trouble is not None and trouble.kind is not TroubleKind.CANCELLED:  # who told it knows
        _say(trouble.text)
    return 0 if trouble is None and all(end.returncode == 0 for end in ends) else 1


def _lead(spec: JobSpec, step: Step) -> tuple[tuple[PhaseEnd, ...], Health | None]:
    """Run the attempt of a spec on all tasks."""
    step.meeting.open()
    try:
        ends, health = _carry_out(spec, partial(step.start, os.environ))
    finally:
        step.meeting.close()
    return ends, merge_health((health, *step.healths))


def _carry_out(
    spec: JobSpec, start: StartPhase | None
) -> tuple[tuple[PhaseEnd, ...], Health | None]:
    """Run the attempt of a spec."""
    if spec.plan.dirs.root.exists():
        raise SecondStartError(
            f"the job was started a second time, and {spec.plan.dirs.root} holds what the first "
            f"start left; nothing was run"
        )
    plan = in_this_environment(spec, os.environ)
    if start is None:
        _need_one_node(spec.plan)
    gpus = gather_facts(spec.root).host.gpus if spec.watches_gpus else ()
    with HealthWatch(gpus) as watch:
        ends = run_attempt(
            plan,
            json.loads(spec.description),
            ForwardingListener(on_lines=_print_lines),
            start=start,
            losses=FiniteLosses(names=spec.losses) if spec.losses else None,
        )
        return ends, watch.finish()


def _need_one_node(plan: AttemptPlan) -> None:
    """Refuse a plan for several nodes where there is one task alone.

    Raises:
        LaunchError: It is one.
    """
    num_nodes = max(phase.num_nodes for phase in plan.phases)
    if num_nodes > 1:
        raise LaunchError(
            "srun",
            f"started 1 task, expected some on each of {num_nodes} nodes; give srun "
            f"--nodes={num_nodes}, in an allocation of as many",
        )


def in_this_environment(spec: JobSpec, env: Mapping[str, str]) -> AttemptPlan:
    """Return the plan of a spec with the environment of the job around each phase."""
    base = {**inherited(env), **spec.env}
    phases = tuple(replace(phase, env={**base, **phase.own_env}) for phase in spec.plan.phases)
    return replace(spec.plan, phases=phases)


def _print_lines(lines: list[str]) -> None:
    print(*lines, sep="\n", flush=True)  # noqa: T201 - the job's log


def _say(text: str) -> None:
    print(f"pytest-megatron: {text}", file=sys.stderr, flush=True)  # noqa: T201 - the job's log


def _end(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # once is enough; ending takes a while
    raise ToldToEndError(f"the job was told to end by {signal.Signals(number).name}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

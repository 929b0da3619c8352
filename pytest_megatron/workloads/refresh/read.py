"""Candidates for goldens: written in a run, read of a finished one (effects: files).

Everything comes from the run's own files, whose paths are of the machine that it ran on: only
their last parts count. Nothing in them is trusted to lead out of the project or the run.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from pytest_megatron.base.files import digest_of, write_text_atomically
from pytest_megatron.base.text import counted
from pytest_megatron.errors import GoldenError, MegatronError
from pytest_megatron.gpu.host import CPU_PLATFORM
from pytest_megatron.runs.environment import SessionFacts, ci_page, utc_now
from pytest_megatron.runs.layout import COMPARISON_FILE, PLAN_FILE, ItemDirs
from pytest_megatron.runs.record import (
    RecordedAttempt,
    RecordedComparison,
    RecordedGolden,
    RecordedPlan,
    RecordedWorkload,
    read_record,
)
from pytest_megatron.runs.record import read_run as read_run_file
from pytest_megatron.workloads.golden.build import (
    combine,
    series_of_generation,
    spread_of,
)
from pytest_megatron.workloads.golden.compare.result import render
from pytest_megatron.workloads.golden.model import (
    NOWHERE,
    Generation,
    Golden,
    MetricMap,
    Provenance,
)
from pytest_megatron.workloads.golden.policy import (
    ComparedWorkload,
    ComparisonPolicy,
)
from pytest_megatron.workloads.golden.store import (
    golden_text,
    read_golden,
    read_metrics,
)
from pytest_megatron.workloads.recipe.case import (
    CASE_NAME,
    CASES,
    GOLDENS,
    CaseMode,
    TestType,
    WorkloadCase,
    parse_case,
    read_case,
)
from pytest_megatron.workloads.recipe.load import read_recipe
from pytest_megatron.workloads.refresh.gate import Candidate
from pytest_megatron.workloads.verdict.compare import compare_in_mode
from pytest_megatron.workloads.verdict.job import CheckedJob, Training, WorkloadJob, metric_names_of

CANDIDATE = "golden_candidate.json"
_TARGET = re.compile(r"[\w.+=-]+/[\w.+=-]+/golden_values_[\w.+-]+\.json").fullmatch


def read_run(run_dir: Path, root: Path, policy: ComparisonPolicy) -> tuple[Candidate, ...]:
    """Return the workloads of a run that disagree with their goldens, in the order of the run.

    Those that agree offer nothing. Those that the run was stopped in come last.

    Args:
        run_dir: A run directory, or an unpacked artifact of one.
        root: The project, which has the cases.
        policy: Under which repeats must agree.

    Raises:
        RunError: It is no run directory.
        GoldenError: It names a golden that is none of a project.
    """
    found = []
    run = read_run_file(run_dir)
    for node_id, record in run.items.items():
        if not isinstance(record, RecordedWorkload) or record.golden is None:
            continue
        directory = run_dir / _name_of(record.directory)
        found.append(read_candidate(node_id, record, directory, root, policy))
    plans = {path.parents[2]: path for path in run_dir.glob(f"*/*/*/{PLAN_FILE}")}
    for directory, path in sorted(plans.items()):
        plan = read_record(path, RecordedPlan)
        if plan.node_id not in run.items:
            found.append(
                Candidate(
                    node_id=plan.node_id,
                    target=PurePosixPath(directory.name),
                    directory=directory,
                    record=RecordedWorkload(
                        verdict="broken",
                        problem="the run was stopped while this was measured; run it again",
                    ),
                )
            )
    return tuple(found)


def read_candidate(
    node_id: str,
    record: RecordedWorkload,
    directory: Path,
    root: Path,
    policy: ComparisonPolicy,
) -> Candidate:
    """Return one workload of a run; faults of its files go into `damage`.

    Args:
        node_id: Node id of the workload.
        record: From `run.json`.
        directory: Directory of the workload.
        root: The project.
        policy: Under which repeats must agree.

    Raises:
        GoldenError: The record names a golden that is none of a project.
    """
    golden = record.golden or RecordedGolden()
    target = _target_of(golden, node_id)
    found = Candidate(node_id=node_id, target=target, directory=directory, record=record)
    try:
        return _with_values(found, root, policy)
    except (MegatronError, OSError) as error:
        text = (
            str(error)
            if isinstance(error, MegatronError)
            else f"{error.filename or directory}: {error}"
        )
        return replace(found, damage=(text,))


def _edited(directory: Path, files: Sequence[Path], digests: Mapping[str, str]) -> Iterator[str]:
    """Yield the files that are not as the run left them, or that it noted no digest of."""
    for file in files:
        if digests.get(file.relative_to(directory).as_posix()) != digest_of(file):
            yield f"{file}: is not what the run measured; accept the run as it was"


def _with_values(found: Candidate, root: Path, policy: ComparisonPolicy) -> Candidate:
    """Return a candidate with the metrics that its repeats measured."""
    record = found.record
    digests = (record.golden or RecordedGolden()).digests or {}
    clean = [attempt for attempt in record.attempts if attempt.cause is None]
    path = found.directory / CANDIDATE
    if not clean or not path.is_file():
        return found
    problem = _wrong_attempts(found.directory, record)
    if problem is not None:
        return replace(found, damage=(problem,))
    files = [_measured(_attempt_dir(found.directory, attempt)) for attempt in clean]
    files += [file] if (file := ItemDirs(root=found.directory).by_hand).is_file() else []
    measured = [read_metrics(file) for file in files]
    repeats: list[MetricMap] = [
        m.metrics if m.generation is None else series_of_generation(m.generation) for m in measured
    ]
    plan = read_record(_attempt_dir(found.directory, clean[0]) / PLAN_FILE, RecordedPlan)
    if plan.node_id != found.node_id:
        return replace(found, damage=(f"{found.directory}: plan.json is of {plan.node_id!r}",))
    case, place = _case_of(found, root)
    found = replace(
        found,
        golden=read_golden(path),
        repeats=tuple(repeats),
        first_step=_first_step(plan, case),
        last_step=_last_step(plan),
        has_cross_entropy=case.mode is CaseMode.PRETRAINING,
        is_lightweight=plan.is_lightweight,
        disagreements=tuple(_disagreements(found.directory)),
        damage=tuple(_edited(found.directory, [path, *files], digests)),
    )
    sides = [m.generation or m.metrics for m in measured]
    return replace(found, spread=tuple(_spread(case, sides, files, policy.at(place))))


def _spread(
    case: WorkloadCase,
    sides: Sequence[MetricMap | Generation],
    files: Sequence[Path],
    policy: ComparisonPolicy,
) -> Iterator[str]:
    """Compare every repeat but the first with the first, as if that were the golden."""
    first = sides[0]
    stand_in = Golden(
        path=str(files[0]),
        metrics={} if isinstance(first, Generation) else first,
        generation=first if isinstance(first, Generation) else None,
        provenance=Provenance(deterministic=not case.is_nondeterministic),
    )
    for number, side in enumerate(sides[1:], start=2):
        for comparison in compare_in_mode(
            case, stand_in, side, metrics=metric_names_of(case), policy=policy, surroundings=NOWHERE
        ):
            if not comparison.passed:
                yield f"repeat {number}: {render(comparison)}"


def _wrong_attempts(directory: Path, record: RecordedWorkload) -> str | None:
    """Return why the record does not fit the files of the directory."""
    listed = {_attempt_dir(directory, attempt) for attempt in record.attempts}
    there = {path for path in directory.glob("repeat_*/attempt_*") if path.is_dir()}
    if listed != there:
        return (
            f"{directory}: run.json lists {counted(len(listed), 'attempt')}, "
            f"the directory holds {len(there)}; accept the run as it was"
        )
    return None


def _disagreements(directory: Path) -> Iterator[str]:
    """Yield the failed comparisons of `comparison.json`, but for those with the golden."""
    comparison = read_record(directory / COMPARISON_FILE, RecordedComparison)
    for repeat in comparison.repeats:
        for one in repeat.comparisons if repeat.against != "golden" else ():
            if not one.passed:
                where = f"repeat {repeat.repeat} against the {repeat.against}"
                yield f"{where}: {one.text or one.metric}"


def _attempt_dir(directory: Path, one: RecordedAttempt) -> Path:
    dirs = ItemDirs(root=directory)
    return dirs.attempt(repeat=one.repeat or 0, attempt=one.attempt or 0).root


def _case_of(found: Candidate, root: Path) -> tuple[WorkloadCase, ComparedWorkload]:
    """Return the case of a workload: its file, or its row where that is in the short form.

    Beside it stands what a policy may select the workload by.

    Raises:
        CaseError: There is neither.
    """
    path = root / CASES / Path(*found.target.parts[-3:-1]) / CASE_NAME
    file, _, name = found.node_id.partition("::")
    rows = () if path.is_file() else read_recipe(root / file).workloads
    for row in rows:
        if row.item_name == name and row.own_case is not None:
            return parse_case(row.own_case), ComparedWorkload.of(row)
    case = "/".join(found.target.parts[-3:-1])
    return read_case(path), ComparedWorkload(case=case, platform=found.record.platform)


def _measured(attempt: Path) -> Path:
    """Return the file with the values of an attempt: windows in one, requests, or phase 1."""
    places = (attempt / "metrics.json", attempt / "phase_1" / "generated.json")
    return next((p for p in places if p.is_file()), attempt / "phase_1" / "metrics.json")


def _last_step(plan: RecordedPlan) -> int | None:
    is_until = plan.until_iteration is not None or not plan.phases
    return plan.until_iteration if is_until else plan.phases[0].last_iteration


def _first_step(plan: RecordedPlan, case: WorkloadCase) -> int | None:
    """Return where the training begins; None for a checkpoint from outside of the run."""
    back_to = plan.phases[0].rewind_to if plan.phases else None
    if back_to is None:
        return None if case.test_type is TestType.FROZEN_START else 1
    return back_to + 1


def _target_of(golden: RecordedGolden, node_id: str) -> PurePosixPath:
    """Return where a golden belongs.

    Raises:
        GoldenError: A project has no goldens at its path.
    """
    text = golden.target or ""
    for place in (GOLDENS, CASES):
        prefix = f"{place.as_posix()}/"
        is_below = text.startswith(prefix) and ".." not in text
        if is_below and _TARGET(text.removeprefix(prefix)):
            return PurePosixPath(text)
    raise GoldenError(
        node_id,
        f"its golden is {golden.target!r}, expected {GOLDENS}/MODEL/CASE/"
        "golden_values_ENVIRONMENT_PLATFORM.json; nothing was written",
    )


def _name_of(directory: str | None) -> str:
    """Return the name of a workload's directory, which lies in the run's."""
    name = PurePosixPath(directory or "").name
    return "none" if name in ("", "..") else name


def make_candidate(
    training: Training,
    facts: SessionFacts,
    *,
    is_dirty: bool,
    arguments: Sequence[str],
) -> Path:
    """Write the values of a training, as a golden, into its run directory; return the file.

    Args:
        training: At least one repeat of it is clean.
        facts: Where it ran.
        is_dirty: Whether it trained another program than the commit names.
        arguments: The arguments typed after `pytest`.

    Raises:
        GoldenError: A value is not a finite number, so that it could be no golden.
        OSError: It cannot be written.
    """
    generation = training.clean[0].generation
    repeats = [attempt.series for attempt in training.clean]
    if training.job.dirs.by_hand.is_file():
        repeats.append(read_metrics(training.job.dirs.by_hand).metrics)
    names = training.job.metric_names or ()
    metrics = repeats[0] if generation is not None else combine(repeats, names)
    provenance = _provenance(training, metrics, repeats, facts, is_dirty=is_dirty)
    path = training.job.dirs.root / CANDIDATE
    golden = Golden(
        path=str(path),
        metrics=metrics if generation is None else {},
        generation=generation,
        provenance=replace(provenance, command=("pytest", *arguments)),
    )
    write_text_atomically(path, golden_text(golden))
    return path


def make_prospect(
    checked: CheckedJob, target: PurePosixPath, facts: SessionFacts, *, is_here: bool = True
) -> Candidate:
    """Return a candidate as it is known before its training: all but the values.

    Args:
        checked: The training.
        target: The golden that it may become.
        facts: Facts of this machine.
        is_here: True if this machine trains, so that its GPUs are known.
    """
    job = checked.job
    provenance = Provenance(
        commit=facts.commit,
        is_dirty=bool(facts.uncommitted),
        gpu=_gpu(job, facts) if is_here else None,
        config_hash=job.config_hash,
        world_size=checked.plan.phases[0].world_size,
    )
    return Candidate(
        node_id=job.node_id,
        target=target,
        directory=job.dirs.root,
        record=RecordedWorkload(
            verdict="skipped", platform=job.workload.platform if is_here else None
        ),
        golden=Golden(path=str(target), metrics={}, provenance=provenance),
    )


def _gpu(job: WorkloadJob, facts: SessionFacts) -> str | None:
    """Return how many GPUs of which kind a job has; None on the CPU."""
    is_gpu = job.workload.platform != CPU_PLATFORM and bool(facts.host.gpus)
    return f"{job.workload.gpus}x {facts.host.gpus[0].name}" if is_gpu else None


def _provenance(
    training: Training,
    metrics: MetricMap,
    repeats: Sequence[MetricMap],
    facts: SessionFacts,
    *,
    is_dirty: bool,
) -> Provenance:
    """Return where the values come from and how far the repeats differ."""
    job, first = training.job, training.clean[0]
    gpu = _gpu(job, facts)
    if first.generation is None:
        spread = spread_of(repeats, metrics)
        compared = [name for name in job.metric_names or () if name in spread]
        is_equal = all(spread[name] == 0.0 for name in compared)
    else:
        spread = {}
        is_equal = all(repeat == metrics for repeat in repeats)
    return Provenance(
        commit=facts.commit,
        is_dirty=is_dirty,
        image=facts.image,
        gpu=gpu,
        driver=None if gpu is None else facts.host.driver,
        host_class=facts.host.platform_class(job.workload.platform),
        precision=None if job.case is None else job.case.precision,
        versions=facts.versions_on(job.workload.platform) | {"python": facts.python},
        date=utc_now(),
        repeats=len(repeats),
        deterministic=is_equal,
        spread=spread,
        config_hash=job.config_hash,
        world_size=first.ends[0].plan.world_size if first.ends else None,
        run=ci_page(os.environ) or job.dirs.root.parent.name,
    )

"""The candidate of a training: the median of its repeats, with provenance.

The file stays in the run directory. The gate decides later, from the run's files alone, if it may
become a golden.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from pytest_megatron.base.files import write_text_atomically
from pytest_megatron.gpu.host import CPU_PLATFORM
from pytest_megatron.runs.environment import SessionFacts, ci_page, utc_now
from pytest_megatron.workloads.golden.build import combine, spread_of
from pytest_megatron.workloads.golden.model import Golden, MetricMap, Provenance
from pytest_megatron.workloads.golden.policy import direction_of
from pytest_megatron.workloads.golden.store import golden_text, project_form, read_metrics
from pytest_megatron.workloads.recipe.case import WorkloadCase, case_document, fingerprint
from pytest_megatron.workloads.refresh.candidate import Candidate
from pytest_megatron.workloads.refresh.read import CANDIDATE
from pytest_megatron.workloads.verdict.job import CheckedJob, Training, WorkloadJob

_SIZES = {
    "tp": "--tensor-model-parallel-size",
    "pp": "--pipeline-model-parallel-size",
    "cp": "--context-parallel-size",
    "ep": "--expert-model-parallel-size",
}


def make_candidate(
    training: Training, facts: SessionFacts, *, arguments: Sequence[str], policy: str
) -> Path:
    """Write the values of a training, as a golden, into its run directory; return the file.

    Args:
        training: At least one repeat of it is clean.
        facts: Where it ran.
        arguments: The arguments typed after `pytest`.
        policy: The policy of the run.

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
    provenance = _provenance(training, metrics, repeats, facts)
    path = training.job.dirs.root / CANDIDATE
    golden = Golden(
        path=str(path),
        metrics=metrics if generation is None else {},
        generation=generation,
        provenance=replace(provenance, command=("pytest", *arguments), policy=policy),
    )
    write_text_atomically(path, golden_text(golden, project_form(training.job.setting.root)))
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
        is_dirty=facts.is_dirty and facts.is_uncommitted,
        gpu=_gpu(job, facts) if is_here else None,
        config_hash=_config_hash(job),
        world_size=checked.plan.phases[0].world_size,
    )
    return Candidate(
        node_id=job.node_id,
        target=target,
        directory=job.dirs.root,
        verdict="",
        golden=Golden(path=str(target), metrics={}, provenance=provenance),
        platform=job.workload.platform if is_here else None,
    )


def _gpu(job: WorkloadJob, facts: SessionFacts) -> str | None:
    """Return how many GPUs of which kind a job has; None on the CPU."""
    is_gpu = job.workload.platform != CPU_PLATFORM and bool(facts.host.gpus)
    return f"{job.workload.gpus}x {facts.host.gpus[0].name}" if is_gpu else None


def _provenance(
    training: Training, metrics: MetricMap, repeats: Sequence[MetricMap], facts: SessionFacts
) -> Provenance:
    """Return where the values come from and how far the repeats differ."""
    job, first = training.job, training.clean[0]
    gpu = _gpu(job, facts)
    seed = None if job.case is None else job.case.argument("--seed")
    if first.generation is None:
        spread = spread_of(repeats, metrics)
        compared = [name for name in job.metric_names or () if name in spread]
        is_equal = all(spread[name] == 0.0 for name in compared)
        directions = {name: direction_of(name) for name in metrics}
    else:
        spread, directions = {}, {}
        is_equal = all(repeat == metrics for repeat in repeats)
    return Provenance(
        commit=facts.commit,
        is_dirty=facts.is_dirty and facts.is_uncommitted,
        image=facts.image,
        gpu=gpu,
        driver=None if gpu is None else facts.host.driver,
        host_class=facts.host.platform_class(job.workload.platform),
        precision=None if job.case is None else job.case.precision,
        versions=facts.versions_on(job.workload.platform) | {"python": facts.python},
        date=utc_now(),
        repeats=len(repeats),
        deterministic=is_equal,
        audit=None if training.audit is None else training.audit.headline,
        spread=spread,
        directions=directions,
        config_hash=_config_hash(job),
        world_size=first.ends[0].plan.world_size if first.ends else None,
        layout=None if job.case is None else _layout(job.case),
        seed=int(seed) if seed is not None and seed.isdecimal() else None,
        run=ci_page(os.environ) or job.dirs.root.parent.name,
    )


def _config_hash(job: WorkloadJob) -> str:
    """Return the fingerprint of the case and the recipe row."""
    case = case_document(job.setting.root, job.workload)
    return fingerprint(job.workload, None if case is None else case.value)


def _layout(case: WorkloadCase) -> str | None:
    """Return `tp2 pp2`; None where nothing is split."""
    parts = [f"{name}{size}" for name, key in _SIZES.items() if (size := case.argument(key))]
    return " ".join(parts) or None

"""Judgement of a recipe's own script by the files that it wrote and its case."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_megatron.errors import GoldenError, MetricsError
from pytest_megatron.runs.layout import AttemptDirs
from pytest_megatron.workloads.golden.compare.rl import with_one_loss_name
from pytest_megatron.workloads.golden.model import Generation, MetricMap
from pytest_megatron.workloads.golden.store import read_metrics
from pytest_megatron.workloads.recipe.case import (
    LIGHTWEIGHT_ITERS,
    CaseMode,
    TestType,
    WorkloadCase,
)
from pytest_megatron.workloads.training.run.runner import PhaseEnd
from pytest_megatron.workloads.verdict.attempt import (
    FailureCause,
    cause_of_measured,
    find_problem,
    missing_metric,
    why_it_failed,
)

_RESUMES = (TestType.CKPT_RESUME, TestType.FROZEN_RESUME)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptResult:
    """Result of a script.

    Attributes:
        metrics: Metrics of each training that it ran: one, or two of a resume.
        generation: Result of an inference case.
        cause: None if it did what the case expects.
    """

    metrics: tuple[MetricMap, ...] = ()
    generation: Generation | None = None
    cause: FailureCause | None = None


def judge_script(
    end: PhaseEnd,
    case: WorkloadCase,
    dirs: AttemptDirs,
    *,
    metric_names: Sequence[str],
    is_lightweight: bool,
    time_limit_s: float,
) -> ScriptResult:
    """Return what a script wrote and what is wrong with it, if anything.

    Args:
        end: How the script ended.
        case: Says what must have been measured.
        dirs: Directories of the attempt; the script wrote below its `assets` and `artifacts`.
        metric_names: Names by `metric_names_of`.
        is_lightweight: Whether it was to train only a few iterations.
        time_limit_s: For the text.
    """
    if not end.is_clean:
        return ScriptResult(cause=why_it_failed(end, time_limit_s))
    if (restarted := _find_restart(dirs)) is not None:
        text = "the script ended with exit code 0, but a rank failed and was started again"
        return ScriptResult(cause=FailureCause(text=text, see=str(restarted)))
    try:
        if case.mode is CaseMode.INFERENCE:
            return _judge_generation(dirs, metric_names)
        return _judge_training(case, dirs, metric_names, is_lightweight=is_lightweight)
    except (GoldenError, MetricsError) as error:
        return ScriptResult(
            cause=FailureCause(text=f"the script ended with exit code 0, but {error}")
        )


def _judge_generation(dirs: AttemptDirs, names: Sequence[str]) -> ScriptResult:
    """Return what a script's inference program generated."""
    for path in _json_files(dirs):
        generation = read_metrics(path).generation
        if generation is None:
            continue
        absent = next((name for name in names if not generation.has(name)), None)
        cause = (
            None
            if absent is None
            else FailureCause(text=missing_metric(generation, absent), see=str(path))
        )
        return ScriptResult(generation=generation, cause=cause)
    raise MetricsError(str(dirs.assets), "holds no output of an inference program")


def _judge_training(
    case: WorkloadCase, dirs: AttemptDirs, names: Sequence[str], *, is_lightweight: bool
) -> ScriptResult:
    """Return what a script's trainings measured."""
    places = _event_dirs(dirs) or _json_files(dirs)[:1]
    wanted = 2 if case.test_type in _RESUMES else 1
    if len(places) != wanted:
        found = ", ".join(str(place.relative_to(dirs.root)) for place in places) or "none"
        raise MetricsError(
            str(dirs.assets), f"holds metrics of {found}, expected those of {wanted} training(s)"
        )
    last = case.train_iters
    if case.mode is CaseMode.RL or case.test_type is TestType.RELEASE:
        last = case.exit_interval or last
    if is_lightweight:
        last = min(last, LIGHTWEIGHT_ITERS)
    measured: list[MetricMap] = []
    for place in places:
        metrics = read_metrics(place).metrics
        measured.append(with_one_loss_name(metrics) if case.mode is CaseMode.RL else metrics)
        if problem := find_problem(measured[-1], names, last):
            cause = cause_of_measured(problem, str(place), None)
            return ScriptResult(metrics=tuple(measured), cause=cause)
    return ScriptResult(metrics=tuple(measured))


def _event_dirs(dirs: AttemptDirs) -> list[Path]:
    """Return every directory of TensorBoard files; `results/` belongs to its parent."""
    found = {
        path.parent.parent if path.parent.name == "results" else path.parent
        for root in (dirs.assets, dirs.artifacts)
        for path in root.rglob("events*tfevents*")
    }
    return sorted(found)


def _json_files(dirs: AttemptDirs) -> list[Path]:
    """Return the files that a driver extracts its metrics to, or a program writes requests to."""
    return sorted(dirs.assets.glob("golden_values*.json"))


def _find_restart(dirs: AttemptDirs) -> Path | None:
    """Return logs of a second attempt of a launcher: its first one failed, whatever came after."""
    return next(iter(sorted(dirs.assets.rglob("attempt_[1-9]*"))), None)


def find_saved(dirs: AttemptDirs, key: str) -> Path:
    """Return the last checkpoint that Megatron-LM's driver had a start of a training save.

    Args:
        dirs: Directories of the attempt.
        key: `MODEL_ARGS_<n>` of the start.

    Raises:
        MetricsError: There is none.
    """
    places = (dirs.artifacts, dirs.assets, dirs.checkpoints)
    found = [path for place in places for path in place.rglob(f"repeat_*_key_{key}/iter_*")]
    if not found:
        raise MetricsError(str(dirs.artifacts), f"holds no checkpoint of {key}")
    return max(found, key=lambda path: path.name)

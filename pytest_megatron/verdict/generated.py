"""Whether one attempt of an inference program wrote what it should, and if not, why."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_megatron.errors import GoldenError, MetricsError
from pytest_megatron.golden.generation import Generation
from pytest_megatron.golden.store import read_metrics
from pytest_megatron.launch.local import PhaseEnd
from pytest_megatron.triage.signature import Table
from pytest_megatron.verdict.attempt import FailureCause, why_it_failed


def judge_generation(
    ends: Sequence[PhaseEnd],
    *,
    metric_names: Sequence[str],
    time_limit_s: float,
    table: Table | None = None,
) -> tuple[Generation | None, FailureCause | None]:
    """Return what an inference program generated and what is wrong with it, if anything.

    Args:
        ends: Its phases; there is one.
        metric_names: What must be there, for the run or for every request.
        time_limit_s: For the text.
        table: The signatures; None takes those of the package.
    """
    (end,) = ends
    if not end.is_clean:
        return None, why_it_failed(end, time_limit_s, table)
    path = end.plan.dirs.generated
    if not path.exists():
        text = (
            f"the program ended with exit code 0, but wrote no {path}, expected its requests "
            f"there; give it the path ${{INFERENCE_OUTPUT_PATH}}; see {end.plan.dirs.launcher_log}"
        )
        return None, FailureCause(text=text)
    try:
        generation = read_metrics(path).generation
    except (GoldenError, MetricsError) as error:
        return None, FailureCause(text=f"the program ended with exit code 0, but {error}")
    if generation is None:
        return None, FailureCause(text=f"{path}: holds series of a training, expected requests")
    for name in metric_names:
        if not generation.has(name):
            return generation, FailureCause(text=missing_metric(generation, name, str(path)))
    return generation, None


def missing_metric(generation: Generation, name: str, path: str) -> str:
    """Say which metric is not there, and what is."""
    keys = {key for request in generation.requests.values() for key in request.content}
    found = ", ".join(sorted({*keys, *generation.content} - {"input_prompt"}))
    return f"the program wrote no {name!r} for every request, only {found}; see {path}"

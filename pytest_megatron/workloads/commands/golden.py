"""`pytest-megatron golden`: goldens outside pytest; here the comparison of a run with one.

Thin: reads, compares and prints. Errors go up to `main`, which ends with exit code 2.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from pytest_megatron.base.command import EXIT_FAILED, PATH, LazyGroup, echo_json, format_option
from pytest_megatron.base.text import one_of, printable
from pytest_megatron.errors import GoldenError, MetricsError
from pytest_megatron.workloads.golden.compare.compare import compare
from pytest_megatron.workloads.golden.compare.inference import Pair, compare_generation
from pytest_megatron.workloads.golden.compare.result import (
    Comparison,
    comparisons_to_json,
    name_unjudged,
    render,
    render_layers,
)
from pytest_megatron.workloads.golden.model import (
    GENERATION_METRICS,
    Golden,
    Observed,
    RunEnvironment,
    refuse_disagreements,
    why_not_timed,
)
from pytest_megatron.workloads.golden.policy import ComparedWorkload, ComparisonPolicy, policy_named
from pytest_megatron.workloads.golden.store import read_golden, read_metrics
from pytest_megatron.workloads.verdict.compare import first_off_first

_PATH_PARTS = 4  # of /<model>/<test_case>/golden_values_<environment>_<platform>.json


class _GoldenCommands(LazyGroup):
    lazy = {  # noqa: RUF012 - the base class says what it is
        "accept": (
            "workloads.commands.golden_refresh:accept",
            "Make goldens of the values of runs.",
        ),
        "diff": ("workloads.commands.golden_diff:diff", "Print how goldens differ."),
        "lint": ("workloads.commands.golden_lint:lint", "Report errors in goldens."),
    }


@click.group(
    "golden", cls=_GoldenCommands, context_settings={"help_option_names": ["-h", "--help"]}
)
def command() -> None:
    """Compare observed metrics with golden values, and refresh them."""


@command.command("check")
@click.option("--golden", "golden_file", type=PATH, required=True, metavar="FILE")
@click.option(
    "--observed",
    "observed_path",
    type=PATH,
    required=True,
    metavar="PATH",
    help="A metric-map JSON, a .jsonl file, a TensorBoard event file or directory.",
)
@click.option(
    "--metric",
    "metrics",
    multiple=True,
    metavar="NAME",
    help="Compare this metric (repeatable).  [default: what the policy says]",
)
@click.option(
    "--golden-policy",
    default=ComparisonPolicy.STRICT.name,
    show_default=True,
    metavar="POLICY",
    help="strict, megatron or the path of a policy file.",
)
@click.option("--nondeterministic", is_flag=True, help="Results vary from run to run.")
@click.option("--host-class", metavar="NAME", help="Judge time and memory of this class of host.")
@format_option("text", "json")
def check(  # noqa: PLR0913 - click hands over one argument an option
    *,
    golden_file: Path,
    observed_path: Path,
    metrics: tuple[str, ...],
    golden_policy: str,
    nondeterministic: bool,
    host_class: str | None,
    form: str,
) -> None:
    """Compare a run's metrics with a golden.

    Every bit counts only where a policy file says `exact: always`, for the image and the versions
    of the run are not known here.

    Exit code 0: every metric passed. 1: at least one failed. 2: the input is unusable, or nothing
    of it was judged.
    """
    policy = policy_named(golden_policy).at(_place_of(golden_file))
    golden = read_golden(golden_file)
    observed = read_metrics(observed_path)
    _require_common_metric(golden, observed, observed_path)
    if golden.generation is not None:
        comparisons = _compare_generation(golden, observed, metrics, policy, host_class)
    else:
        comparisons = compare(
            golden,
            observed.metrics,
            metrics=metrics or None,
            policy=policy,
            nondeterministic=nondeterministic,
            surroundings=RunEnvironment(host_class=host_class),
        )
    refuse_disagreements(observed.disagreements, [one.metric for one in comparisons])
    if not comparisons:
        raise GoldenError(
            golden.path, f"has no metric that {policy.name} compares by default; give --metric"
        )
    if form == "json":
        echo_json(comparisons_to_json(comparisons, policy.name))
    else:
        click.echo(printable(_as_text(comparisons, policy)))
    if not all(comparison.passed for comparison in comparisons):
        sys.exit(EXIT_FAILED)
    if not any(comparison.is_judged for comparison in comparisons):
        raise GoldenError(golden.path, "nothing of it was judged, see above; give --host-class")


def _compare_generation(
    golden: Golden,
    observed: Observed,
    metrics: tuple[str, ...],
    policy: ComparisonPolicy,
    host_class: str | None,
) -> tuple[Comparison, ...]:
    """Compare the output of an inference program; by default whatever the golden has."""
    assert golden.generation is not None
    assert observed.generation is not None
    for name in metrics:
        if name not in GENERATION_METRICS:
            known = one_of(name, GENERATION_METRICS)
            raise GoldenError("--metric", f"{name!r} is not compared, expected {known}")
    pair = Pair(
        golden=golden.generation,
        observed=observed.generation,
        path=golden.path,
        policy=policy,
        not_timed=why_not_timed(golden, host_class) if policy.is_strict else None,
    )
    wanted = metrics or tuple(m for m in GENERATION_METRICS if golden.generation.has(m))
    return compare_generation(pair, wanted) if wanted else ()


def _require_common_metric(golden: Golden, observed: Observed, path: Path) -> None:
    """Refuse a run that has no metric of the golden."""
    if (golden.generation is None) != (observed.generation is None):
        kinds = ("series of a training", "the output of an inference program")
        raise MetricsError(
            str(path),
            f"holds {kinds[observed.generation is not None]}, the golden {golden.path} "
            f"{kinds[golden.generation is not None]}",
        )
    if golden.generation is not None:
        return
    if not golden.metrics.keys() & observed.metrics.keys():
        have, want = sorted(observed.metrics), sorted(golden.metrics)
        raise MetricsError(
            str(path), f"no metric in common with {golden.path}: it has {have}, the golden {want}"
        )


def _lines(comparison: Comparison) -> tuple[str, ...]:
    return (render(comparison), *(f"    {line}" for line in render_layers(comparison)))


def _place_of(golden: Path) -> ComparedWorkload | None:
    """Return the workload that a golden's path names, where it does."""
    environment, _, platform = golden.stem.removeprefix("golden_values_").partition("_")
    if not platform or environment == golden.stem or len(golden.absolute().parts) < _PATH_PARTS:
        return None
    *_, model, test_case, _ = golden.absolute().parts
    return ComparedWorkload(case=f"{model}/{test_case}", platform=platform, environment=environment)


def _as_text(comparisons: tuple[Comparison, ...], policy: ComparisonPolicy) -> str:
    """Return comparisons as text, those that failed first."""
    num_failed = sum(not comparison.passed for comparison in comparisons)
    num_judged = sum(comparison.is_judged for comparison in comparisons)
    verdict = "all passed" if num_judged == len(comparisons) else f"{num_judged} passed"
    if num_failed:
        verdict = f"{num_failed} of {len(comparisons)} failed"
    verdict = ", ".join(filter(None, [verdict, name_unjudged(comparisons)]))
    failed = first_off_first(c for c in comparisons if not c.passed)
    ordered = (*failed, *(c for c in comparisons if c.passed))
    return "\n".join(
        [
            *(line for comparison in ordered for line in _lines(comparison)),
            f"{policy.name}: {verdict}",
        ]
    )

"""A plan as text for people, and as outputs of a step of GitHub Actions. Pure."""

from __future__ import annotations

import json
import secrets
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict

from pytest_megatron.base.files import JsonValue
from pytest_megatron.base.text import counted
from pytest_megatron.ci.budget import budget_lines
from pytest_megatron.ci.jobs import CiJob, integration_matrix, unit_matrix
from pytest_megatron.ci.plan import CiPlan
from pytest_megatron.ci.test_jobs import LeftOut

MAX_MATRIX = 256  # jobs of one matrix; GitHub refuses more
MAX_SHOWN = 3  # rows of one reason


def as_text(plan: CiPlan, *, is_explained: bool = False) -> str:
    """Return the plan for people: each job, its reason and its command."""
    lines = list(_header(plan))
    unjudged = [job for job in plan.jobs if job.compared is False]
    if unjudged and not plan.decision.is_lightweight:
        num_rows = len(plan.workloads)
        lines.append(
            f"{len(unjudged)} of {counted(num_rows, 'workload')} "
            f"{'is' if len(unjudged) == 1 else 'are'} compared with no golden, because of the case"
        )
    if is_explained:
        lines += ["", "rules, the first that holds decides:"]
        for one in plan.decision.considered:
            lines.append(f"  {'->' if one.decides else '  '} {one.rule}: {one.why}")
    for kind, title, rest in (("workload", "workload", ""), ("unit", "job", " of unit tests")):
        jobs = [job for job in plan.jobs if job.kind == kind]
        if not jobs:
            continue
        lines += ["", counted(len(jobs), title) + rest]
        lines += [line for job in jobs for line in _job_lines(job)]
    if not plan.jobs:
        lines += ["", "no jobs"]
    if plan.budget is not None:
        lines += ["", *budget_lines(plan.budget)]
    if is_explained:
        lines += ["", *_left_out_lines(plan.left_out)]
    return "".join(f"{line}\n" for line in lines)


def _header(plan: CiPlan) -> Iterator[str]:
    decision = plan.decision
    kind = "lightweight" if decision.is_lightweight else "full"
    yield (
        f"scope {','.join(decision.scope)}, cadence {','.join(decision.cadence) or 'any'}, "
        f"{counted(decision.n_repeat, 'repeat')}, {kind}, environment {decision.environment}, "
        f"platform {','.join(plan.platforms) or 'any'}, image {decision.image}"
    )
    yield f"because of {decision.reason}"
    for line in decision.label_effects:
        yield f"label {line}"
    for label in decision.unknown_labels:
        yield f"label {label}: nothing here reads it"
    if (found := plan.suggestion) is not None:
        labels = " and ".join(map(repr, found.labels)) or "none"
        yield f"label for these changes: {labels}, {found.reason}"


def _job_lines(job: CiJob) -> Iterator[str]:
    ranks = f"{job.nodes}x{job.ranks} ranks" if job.ranks else "no gang"
    files = f", {counted(job.num_files, 'file')}" if job.kind == "unit" else ""
    judged = ", not compared" if job.compared is False and not job.lightweight else ""
    yield f"  {job.name}  {ranks}{files}, at most {job.timeout_minutes} min{judged}"
    yield f"    {job.command}"


def _left_out_lines(left_out: Sequence[LeftOut]) -> Iterator[str]:
    yield f"left out: {counted(len(left_out), 'row')}"
    by_reason: dict[str, list[str]] = {}
    for one in left_out:
        by_reason.setdefault("; ".join(one.reasons), []).append(one.name)
    for reason, names in sorted(by_reason.items(), key=lambda item: (-len(item[1]), item[0])):
        more = f" and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else ""
        yield f"  {len(names)}: {reason}: {', '.join(names[:MAX_SHOWN])}{more}"


def github_outputs(plan: CiPlan) -> dict[str, str]:
    """Return the outputs of a step; lists and matrices are JSON on one line."""
    decision = plan.decision
    kinds = Counter(job.kind for job in plan.jobs)
    return {
        "scope": ",".join(decision.scope),
        "cadence": ",".join(decision.cadence),
        "n_repeat": str(decision.n_repeat),
        "lightweight": _word(decision.is_lightweight),
        "environment": decision.environment,
        "platform": ",".join(plan.platforms),
        "image": decision.image,
        "reason": decision.reason,
        "suites": _line(list(decision.suites)),
        "suggested_label": (plan.suggestion.label or "") if plan.suggestion else "",
        "docs_only": _word(plan.suggestion is not None and plan.suggestion.docs_only),
        "has_workloads": _word(kinds["workload"] > 0),
        "has_units": _word(kinds["unit"] > 0),
        "integration-tests": _line(integration_matrix(plan.jobs)),
        "unit-tests": _line(unit_matrix(plan.jobs)),
        "workload_jobs": _line([asdict(job) for job in plan.jobs if job.kind == "workload"]),
        "unit_jobs": _line([asdict(job) for job in plan.jobs if job.kind == "unit"]),
    }


def outputs_text(outputs: Mapping[str, str]) -> str:
    """Return outputs as `$GITHUB_OUTPUT` takes them; a value may have several lines.

    The word that ends a value is random: a value that contained it, such as a label of a pull
    request, could set any other output.
    """
    parts = []
    for name, value in outputs.items():
        end = f"end-{secrets.token_hex(16)}"
        parts.append(f"{name}<<{end}\n{value}\n{end}\n")
    return "".join(parts)


def matrix_problem(plan: CiPlan) -> str | None:
    """Return why GitHub would refuse the plan's matrices, None if it takes them."""
    for kind, number in Counter(job.kind for job in plan.jobs).items():
        if number > MAX_MATRIX:
            return (
                f"{number} {kind} jobs, a matrix of GitHub takes {MAX_MATRIX}; "
                f"plan one platform at a time with --platform, or fewer --shards"
            )
    return None


def _word(is_true: bool) -> str:  # noqa: FBT001 - a value, not a choice
    return "true" if is_true else "false"


def _line(value: list[str] | list[JsonValue] | list[dict[str, JsonValue]]) -> str:
    return json.dumps(value, separators=(",", ":"))

"""Reads the plan and the CI system's results of its jobs, for a summary."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pytest_megatron.base.files import JsonValue, parse_json, read_json
from pytest_megatron.ci.summary.merge import Expected, ExpectedJob
from pytest_megatron.ci.summary.model import number_of, rows_of, text_of
from pytest_megatron.errors import CiError

_PLAN = "plan.json"
_GROUPS = {"unit": "unit", "workload": "integration"}  # kind of a job -> job of the workflow


def read_plan(path: Path) -> Expected:
    """Read the output of `pytest-megatron plan --format json`; a directory has it as `plan.json`.

    Raises:
        CiError: It cannot be read, or is no plan.
    """
    return expect(*load_plan(path))


def load_plan(path: Path) -> tuple[dict[str, JsonValue], str]:
    """Return a plan, and the name of its file for errors.

    Raises:
        CiError: It cannot be read, or is no plan.
    """
    file = path / _PLAN if path.is_dir() else path
    try:
        plan = read_json(file)
    except (OSError, ValueError) as error:
        raise CiError(str(file), f"cannot be read as a plan: {error}") from error
    if not isinstance(plan, dict) or not isinstance(plan.get("jobs"), list):
        raise CiError(str(file), "has no 'jobs', expected what 'plan --format json' prints")
    return plan, str(file)


def expect(plan: Mapping[str, JsonValue], where: str) -> Expected:
    """Return the jobs and workloads that a plan requires.

    Raises:
        CiError: A job of it has no id.
    """
    jobs: dict[str, ExpectedJob] = {}
    groups: dict[str, tuple[str, ...]] = dict.fromkeys(_GROUPS.values(), ())
    for row in rows_of(plan, "jobs"):
        name = text_of(row, "id")
        if name is None:
            raise CiError(where, f"has a job without an id: {row}")
        kind, node_id = text_of(row, "kind"), text_of(row, "name")
        compared, policy = row.get("compared"), row.get("policy")
        jobs[name] = ExpectedJob(
            node_id=node_id if kind == "workload" else None,
            n_repeat=int(number_of(row, "n_repeat") or 1),
            is_lightweight=row.get("lightweight") is True,
            is_compared=compared if isinstance(compared, bool) else None,
            policy=policy if isinstance(policy, dict) else None,
        )
        group = _GROUPS.get(kind or "", kind or "")
        groups[group] = (*groups.get(group, ()), name)
    words = ((key, plan.get(key)) for key in ("event", "labels", "scope", "environment", "rule"))
    told = [f"{key} {_shown(value)}" for key, value in words if value]
    return Expected(
        jobs=jobs,
        groups=groups,
        commit=text_of(plan, "commit"),
        run_id=text_of(plan, "run_id"),
        headline=", ".join(told) or None,
    )


def _shown(value: JsonValue) -> str:
    return " and ".join(map(str, value)) if isinstance(value, list) else str(value)


def read_results(text: str) -> dict[str, str]:
    """Read GitHub's `toJSON(needs)`: job of the workflow -> how it ended.

    Raises:
        CiError: It is something else.
    """
    try:
        found = parse_json(text)
    except ValueError as error:
        raise CiError("--results", f"is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise CiError("--results", f"found {text!r}, expected an object of jobs")
    results: dict[str, str] = {}
    for name, told in found.items():
        result = told.get("result") if isinstance(told, dict) else told
        if not isinstance(result, str):
            raise CiError("--results", f"job {name!r} has no result, expected 'success' or so")
        results[name] = result
    return results

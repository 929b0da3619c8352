"""Reads the plan and the CI system's results of its jobs, for a summary."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pytest_megatron.base.files import read_json
from pytest_megatron.base.schema import SchemaError, parse, validate
from pytest_megatron.ci.jobs import PlanFile
from pytest_megatron.errors import CiError

_PLAN = "plan.json"


def read_plan(path: Path) -> PlanFile:
    """Read what `pytest-megatron plan --format json` wrote; a directory has it as `plan.json`.

    Raises:
        CiError: It cannot be read, or is no plan.
    """
    file = path / _PLAN if path.is_dir() else path
    try:
        return validate(PlanFile, read_json(file))
    except SchemaError as error:
        problem = f"{error.problems[0].in_output}; expected what 'plan --format json' prints"
        raise CiError(str(file), problem) from None
    except (OSError, ValueError) as error:
        raise CiError(str(file), f"cannot be read as a plan: {error}") from error


@dataclass(frozen=True, kw_only=True)
class _JobResult:
    """An entry of GitHub's `toJSON(needs)`."""

    result: str


_RESULTS = dict[str, str | _JobResult]


def read_results(text: str) -> dict[str, str]:
    """Read GitHub's `toJSON(needs)`: job of the workflow -> how it ended.

    Raises:
        CiError: It is something else.
    """
    try:
        found = parse(_RESULTS, text)
    except SchemaError as error:
        raise CiError("--results", f"{error}; give toJSON(needs)") from None
    return {n: one if isinstance(one, str) else one.result for n, one in found.items()}

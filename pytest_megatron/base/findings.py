"""Findings about recipes, cases and goldens, as data: file, line, rule, message."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from typing_extensions import override

from pytest_megatron.base.yaml import YamlDocument, YamlPath
from pytest_megatron.errors import RecipeError


class Severity(Enum):
    """Severity of a finding: only an error stops a run."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


# Rule id -> its meaning; the reference documentation has the same table, a test compares them.
RULES = {
    "bare-string": "A single value stands where a list belongs",
    "case-type": "A value of `model_config.yaml` is not of the kind that its key takes",
    "case-unknown-key": "`model_config.yaml` has a top-level key that nothing reads",
    "case-unknown-word": "TEST_TYPE, MODE, TEST_EVALUATION or LAUNCHER has an unknown value",
    "case-unreadable": "`model_config.yaml` cannot be read",
    "case-unset-variable": "A value of `ENV_VARS` or `MODEL_ARGS` refers to an unknown variable",
    "case-void": "A key or word of `model_config.yaml` can have no effect beside the others",
    "duplicate-key": "A mapping of a recipe has one key twice",
    "duplicate-row": "Two rows of a file are the same",
    "missing-case": "A row without a script has no `model_config.yaml`",
    "missing-checkpoint": "A row starts from a frozen checkpoint that it does not name or have",
    "missing-golden": "A row compares metrics and has no golden file",
    "missing-program": "The file that `training_script_path` names is not in the project",
    "no-products": "An entry has no `products`, so it gives no rows",
    "nothing-to-run": "A row has neither `script` nor `training_script_path`",
    "one-test-case": "Megatron-LM would run only the first element of a `test_case` list",
    "row": "A row cannot be built: a placeholder without a value, a value of the wrong type, "
    "or a script for Megatron-LM's driver that is wrong",
    "schema": "A key is unknown or missing, or its value is of the wrong type",
    "similar-key": "An extra key of `spec` or of a product looks like a known one",
    "unknown-word": "A scope, platform, cadence or environment is not in the vocabulary",
    "unreachable-golden": "No row of the recipes reads a golden file",
    "unreadable": "A recipe cannot be read as YAML",
}

# The same for goldens, which `pytest-megatron golden lint` checks.
GOLDEN_RULES = {
    "golden-metric": "A golden lacks a metric that its case compares, or is of another kind",
    "golden-stale": "The test case or the row has changed since the golden was made",
    "golden-truncated": "A golden ends before the training of its case does",
    "golden-unreadable": "A golden cannot be read as one, or nothing can be compared with it",
}

# The first words of the ids in workloads/training/checks/rules.toml, above this layer.
CHECKED = ("connections-", "layout-", "memory-")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        line: Counted from 1; None where the file as a whole is meant.
        rule: A key of `RULES` or `GOLDEN_RULES`, or the id of a check of workloads.
        message: The problem, the expectation, the remedy; lower case, no final period.
    """

    file: Path
    line: int | None
    rule: str
    message: str
    severity: Severity = Severity.ERROR

    def __post_init__(self) -> None:
        is_known = self.rule in RULES or self.rule in GOLDEN_RULES
        assert is_known or self.rule.startswith(CHECKED), self.rule

    @property
    def where(self) -> str:
        """`file:line`, or the file alone."""
        return str(self.file) if self.line is None else f"{self.file}:{self.line}"

    @property
    def is_error(self) -> bool:
        """True if the recipe cannot be used as it is."""
        return self.severity is Severity.ERROR

    @override
    def __str__(self) -> str:
        return f"{self.where}: {self.message}"


def finding_at(
    document: YamlDocument,
    path: YamlPath,
    rule: str,
    message: str,
    severity: Severity = Severity.ERROR,
) -> Finding:
    """Return a finding at a place of a document."""
    line = document.line_of(path)
    return Finding(file=document.file, line=line, rule=rule, message=message, severity=severity)


def in_order(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return findings, each once: errors first, then by file, line and severity."""
    order = {severity: index for index, severity in enumerate(Severity)}
    return tuple(
        sorted(
            dict.fromkeys(findings),
            key=lambda found: (
                not found.is_error,
                str(found.file),
                found.line or 0,
                order[found.severity],
            ),
        )
    )


def as_error(findings: Sequence[Finding]) -> RecipeError:
    """Return one error for the first of several findings, with their number.

    Args:
        findings: Errors of one file, at least one.
    """
    first, *others = findings
    more = f" (and {len(others)} more in this file: see `pytest-megatron lint`)" if others else ""
    return RecipeError(first.where, first.message + more)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        line: Counted from 1; None where the file as a whole is meant.
        rule: Its id, which the reference documentation explains.
        message: The problem, the expectation, the remedy; lower case, no final period.
    """

    file: Path
    line: int | None
    rule: str
    message: str
    severity: Severity = Severity.ERROR

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

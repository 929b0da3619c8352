"""All checks of a workload that need no cluster: its layout and its environment. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from pytest_megatron.base.findings import Finding
from pytest_megatron.errors import RecipeError
from pytest_megatron.workloads.golden.policy import ComparedWorkload
from pytest_megatron.workloads.recipe.case import WorkloadCase
from pytest_megatron.workloads.recipe.model import Workload
from pytest_megatron.workloads.training.checks.layout import hits_of
from pytest_megatron.workloads.training.checks.rules import (
    CheckFinding,
    RuleMatch,
    check_rules,
    finding_of,
)


def findings_of(hits: Iterable[RuleMatch]) -> tuple[CheckFinding, ...]:
    """Return findings in words, each once, errors first."""
    found = {
        (finding.rule.id, finding.where, finding.found): finding
        for finding in (finding_of(hit, check_rules()) for hit in hits)
    }
    return tuple(sorted(found.values(), key=lambda finding: not finding.is_error))


def problem_of(findings: Iterable[CheckFinding]) -> tuple[str, str] | None:
    """Return where and why a workload is refused; None where no finding is an error."""
    errors = [finding for finding in findings if finding.is_error]
    if not errors:
        return None
    first, *others = errors
    more = "".join(f"\n{found.where or ''}: {found.text}" for found in others)
    return first.where or "", f"{first.text}; nothing was run{more}"


def lint_row(workload: Workload, case: WorkloadCase) -> Iterator[Finding]:
    """Yield what is wrong with a row on whatever machine."""
    if workload.disabled_reason is not None:
        return
    try:
        ComparedWorkload.of(workload)
    except RecipeError as error:  # in limits of its own
        line = workload.line
        yield Finding(file=workload.file, line=line, rule="schema", message=error.problem)
    for finding in findings_of(hits_of(workload, case, {})):
        yield _for_lint(finding, case.path)


def _for_lint(finding: CheckFinding, path: Path) -> Finding:
    """Return a check's finding as one of lint."""
    file, _, line = (finding.where or "").rpartition(":")
    return Finding(
        file=Path(file) if line.isdecimal() else path,
        line=int(line) if line.isdecimal() else None,
        rule=finding.rule.id,
        message=f"{finding.found}: {finding.wrong}; {finding.fix}",
        severity=finding.severity,
    )

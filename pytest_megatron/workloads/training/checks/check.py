"""All checks of a workload that need no cluster: its layout and its environment. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from pytest_megatron.base.findings import Finding, Severity
from pytest_megatron.base.text import one_of
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
from pytest_megatron.workloads.training.plan.phases import references
from pytest_megatron.workloads.training.plan.plan import NCCL_DEFAULTS, VARIABLES, inherited


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


def lint_row(workload: Workload, case: WorkloadCase, env: Mapping[str, str]) -> Iterator[Finding]:
    """Yield what is wrong with a row on whatever machine.

    Args:
        workload: The row.
        case: The test case of the row.
        env: The environment, whose variables cases may refer to.
    """
    if workload.disabled_reason is not None:
        return
    try:
        ComparedWorkload.of(workload)
    except RecipeError as error:  # in limits of its own
        line = workload.line
        yield Finding(file=workload.file, line=line, rule="schema", message=error.problem)
    if workload.script is None:
        yield from _unknown_variables(workload, case, env)
    for finding in findings_of(hits_of(workload, case, {})):
        yield _for_lint(finding, case.path)


def _unknown_variables(
    workload: Workload, case: WorkloadCase, env: Mapping[str, str]
) -> Iterator[Finding]:
    """Yield references to variables that are not set here; another machine may have them."""
    is_short = workload.own_case is not None
    own = {*VARIABLES, *case.env}
    variables = "env" if is_short else "ENV_VARS"
    texts = [(case.env_lines[k], f"{variables}.{k}", text, own) for k, text in case.env.items()]
    if is_short:
        texts.append((workload.line, "command", workload.training_script_path or "", own))
    for variant in case.variants:
        names = own | variant.env.keys()
        for argument in variant.arguments:
            text = argument.text or " ".join(argument.words or ())
            texts.append((argument.line, f"{variant.key}.{argument.name}", text, names))
    known = {*NCCL_DEFAULTS, *inherited(env)}
    for line, where, text, names in texts:
        for name, has_default in references(text).items():
            if has_default or name in names or name in known:
                continue
            expected = f"one of this environment, or {one_of(name, names)}"
            yield Finding(
                file=case.path,
                line=line,
                rule="case-unset-variable",
                message=f"{where}: unknown variable {name!r}, expected {expected}",
                severity=Severity.ERROR if is_short else Severity.WARNING,
            )


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

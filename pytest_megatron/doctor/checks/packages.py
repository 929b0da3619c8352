"""Packages that are compiled against torch, against what is installed. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_megatron.doctor.facts import (
    Compiled,
    EnvironmentFacts,
    compat,
    major_of,
    minor_of,
)
from pytest_megatron.workloads.training.checks.rules import RuleMatch


def fitting(row: Compiled, facts: EnvironmentFacts, version: str | None = None) -> str:
    """Return what to do to have a package that fits torch: the wheel's file name, or the build."""
    torch = facts.torch
    if torch is None or torch.cuda is None:
        return f"a build of torch for CUDA first, then {row.name}"
    version = (version or row.latest).partition("+")[0]
    build = row.build or f"pip install --no-build-isolation {row.name}=={version}"
    if row.wheel is None:
        return f"no wheels are published; build it: {build.format(version=version)}"
    name = row.wheel.format(
        version=version,
        cuda_major=major_of(torch.cuda),
        torch=minor_of(torch.version),
        abi="FALSE" if torch.abi is False else "TRUE",
        tag=facts.python.tag,
        machine=facts.python.machine,
    )
    return (
        f"the wheel that fits, if that version has it: {name}; else build it: {row.force} {build}"
    )


def check_compiled(facts: EnvironmentFacts) -> Iterator[RuleMatch]:
    """Yield what is wrong with each package that is compiled against torch, or missing."""
    imports = facts.torch.imports if facts.torch is not None else {}
    for row in compat().compiled:
        package = next(
            (facts.packages[name] for name in (row.name, *row.also) if name in facts.packages), None
        )
        if package is None:
            if facts.torch is not None and facts.torch.cuda is not None:
                fits = fitting(row, facts)
                yield RuleMatch(
                    "compiled-missing", package=row.name, why=row.why, fits=fits, source=row.source
                )
            continue
        for module in row.modules:
            problem = imports.get(module)
            if problem is not None:
                yield RuleMatch(
                    "does-not-import",
                    module=module,
                    package=package.name,
                    version=package.version,
                    problem=problem,
                    why=row.why,
                    fits=fitting(row, facts, package.version),
                )

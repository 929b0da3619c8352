"""Packages that are compiled against torch, and requirements, against what is installed. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name

from pytest_megatron.doctor.facts import (
    Compiled,
    EnvironmentFacts,
    Extension,
    Package,
    Python,
    Torch,
    compat,
    major_of,
    minor_of,
    version_of,
)
from pytest_megatron.workloads.training.checks.rules import RuleMatch

_LOCAL = re.compile(r"cu(\d+)torch(\d+\.\d+)(?:\.\d+)*(?:cxx11abi(TRUE|FALSE))?", re.IGNORECASE)
_SOABI = re.compile(r"\.(cpython-\d+[a-z]*)-([^.]+)\.so$")
_INSTALL = {
    "nvcc": "nvcc: the CUDA toolkit {cuda}, or a -devel image",
    "g++": "g++: apt-get install g++",
    "ninja": "ninja: pip install ninja",
    "nccl.h": "nccl.h: apt-get install libnccl-dev, or CPATH to nvidia/nccl/include",
}
_REQUIRING = ("torch", "megatron-core", "transformer-engine", "nemo-run")


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
        objects = [e for e in facts.extensions if e.package == row.name]
        if row.name == "apex" and not any("amp_C" in e.file.name for e in objects):
            build = (row.build or "").format(version=row.latest)
            yield RuleMatch("not-apex", version=package.version, build=build)
            continue
        yield from _one(row, package, objects, facts)
    if "megatron-core" in facts.packages:
        fits = f"install megatron-core for {facts.python.tag} again"
        yield from list(_tags(facts.packages["megatron-core"], [], facts, fits))[:1]
    yield from _transformer_engine(facts)


def _one(
    row: Compiled, package: Package, objects: list[Extension], facts: EnvironmentFacts
) -> Iterator[RuleMatch]:
    """Yield what is wrong with a compiled package, each rule once."""
    fits = fitting(row, facts, package.version)
    hits = list(_tags(package, objects, facts, fits))
    if facts.torch is not None:
        values = {"package": package.name, "version": package.version, "fits": fits}
        values["torch"] = facts.torch.version
        hits += _local_version(facts.torch, values)
        hits += _objects(objects, facts.torch, values)
    seen: set[str] = set()
    for hit in hits:  # the wheel's name and its objects often say the same
        if hit.rule not in seen:
            seen.add(hit.rule)
            yield hit
    if seen or facts.torch is None:
        return  # its import fails for a reason that is known
    for module in row.modules:
        problem = facts.torch.imports.get(module)
        if problem is not None:
            yield RuleMatch(
                "does-not-import",
                module=module,
                package=package.name,
                version=package.version,
                problem=problem,
                why=row.why,
                fits=fits,
            )


def _tags(
    package: Package, objects: list[Extension], facts: EnvironmentFacts, fits: str
) -> Iterator[RuleMatch]:
    """Compare the Python and the machine of a wheel with these."""
    python = facts.python
    wanted = f"{python.tag} on {python.machine}"
    values = {"package": package.name, "version": package.version, "wanted": wanted, "fits": fits}
    if package.tags and not any(_fits(tag, python) for tag in package.tags):
        yield RuleMatch("python-tag", built=package.tags[0], **values)
    for extension in objects:
        match = _SOABI.search(extension.file.name)
        if match and not python.soabi.startswith(match[1] + "-"):
            yield RuleMatch("python-tag", built=extension.file.name, **values)


def _fits(tag: str, python: Python) -> bool:
    """Return true if a wheel of a tag, `cp312-cp312-linux_x86_64`, can be used by a Python."""
    interpreters, _, rest = tag.partition("-")
    abi, _, platforms = rest.partition("-")
    is_python = any(
        name.startswith("py") or name == python.tag or abi == "abi3"
        for name in interpreters.split(".")
    )
    is_machine = any(
        name == "any" or name.endswith(python.machine) for name in platforms.split(".")
    )
    return is_python and is_machine


def _local_version(torch: Torch, values: Mapping[str, str]) -> Iterator[RuleMatch]:
    """Compare the torch in a wheel's local version with this torch."""
    match = _LOCAL.search(values["version"].partition("+")[2])
    if match is None:
        return
    cuda, built, abi = match[1], match[2], match[3]
    if built != minor_of(torch.version) and version_of(torch.version) is not None:
        yield RuleMatch("abi-torch", built=built, **values)
    have = major_of(torch.cuda)
    if cuda != have and not (len(cuda) > 2 and cuda == (torch.cuda or "").replace(".", "")):  # noqa: PLR2004 - cu12 is a major version, cu128 is 12.8
        yield RuleMatch("abi-cuda", built=cuda, cuda=torch.cuda or "none", **values)
    if abi is not None and torch.abi is not None and (abi.upper() == "TRUE") != torch.abi:
        yield RuleMatch("abi-cxx11", built=int(not torch.abi), wanted=int(torch.abi), **values)


def _objects(
    objects: list[Extension], torch: Torch, values: Mapping[str, str]
) -> Iterator[RuleMatch]:
    """Compare what shared objects ask for with what torch has."""
    for extension in objects:
        cuda = extension.cuda_major
        if cuda is not None and torch.cuda is not None and cuda != major_of(torch.cuda):
            yield RuleMatch("abi-cuda", built=cuda, cuda=torch.cuda, **values)
        if extension.abi is not None and torch.abi is not None and extension.abi != torch.abi:
            yield RuleMatch("abi-cxx11", built=int(extension.abi), wanted=int(torch.abi), **values)
        elif torch.defined and (lost := sorted(extension.missing - torch.defined)):
            yield RuleMatch("abi-symbol", file=extension.file.name, symbol=lost[0], **values)


def _transformer_engine(facts: EnvironmentFacts) -> Iterator[RuleMatch]:
    """Compare the parts of Transformer Engine with one another and with torch's CUDA."""
    names = [name for name in facts.packages if name.startswith("transformer-engine")]
    torch = facts.torch
    if not names or torch is None or torch.cuda is None:
        return
    parts = [facts.packages[name] for name in sorted(names)]
    versions = {package.version.partition("+")[0] for package in parts}
    cores = [name for name in names if re.search(r"-cu\d+$", name)]
    cuda = major_of(torch.cuda)
    problems = []
    if len(versions) > 1:
        problems.append("the parts are of several versions")
    if cores and f"transformer-engine-cu{cuda}" not in cores:
        problems.append(f"none is for CUDA {cuda}, which torch {torch.version} has")
    if len(cores) > 1:
        problems.append("cores for several CUDA are installed over one another")
    if problems:
        there = ", ".join(f"{package.name} {package.version}" for package in parts)
        yield RuleMatch("te-parts", parts=f"{there}: {'; '.join(problems)}", cuda=cuda)


def check_requirements(facts: EnvironmentFacts) -> Iterator[RuleMatch]:
    """Yield requirements of torch, megatron-core and compiled packages that are not met."""
    compiled = [name for row in compat().compiled for name in (row.name, *row.also)]
    for name in (*_REQUIRING, *compiled):
        if name not in facts.packages:
            continue
        package = facts.packages[name]
        if package.requires_python and not _allows(package.requires_python, facts.python.version):
            yield RuleMatch(
                "python-version",
                package=name,
                version=package.version,
                requirement=package.requires_python,
                python=facts.python.version,
            )
        for text in package.requires:
            yield from _requirement(package, text, facts)
    nemo, lepton = facts.packages.get("nemo-run"), facts.packages.get("leptonai")
    if nemo is not None and lepton is not None and not _allows("<0.28", lepton.version):
        yield RuleMatch("nemo-run-leptonai", nemo=nemo.version, lepton=lepton.version)


def _requirement(package: Package, text: str, facts: EnvironmentFacts) -> Iterator[RuleMatch]:
    """Compare a requirement of a package with the version that is installed."""
    try:
        requirement = Requirement(text)
    except InvalidRequirement:
        return
    marker = requirement.marker
    if marker is not None and not marker.evaluate(_marker_environment(facts)):
        return
    other = facts.packages.get(canonicalize_name(requirement.name))
    if other is None or _allows(str(requirement.specifier), other.version):
        return  # what is missing is left to the import: containers leave out much
    yield RuleMatch(
        "requirement",
        package=package.name,
        version=package.version,
        requirement=f"{requirement.name}{requirement.specifier}",
        installed=f"{other.name} {other.version}",
    )


def _marker_environment(facts: EnvironmentFacts) -> dict[str, str]:
    """Return the values of markers for the Python that is examined."""
    version = facts.python.version
    return {
        "extra": "",
        "platform_machine": facts.python.machine,
        "python_full_version": version,
        "python_version": ".".join(version.split(".")[:2]),
    }


def _allows(specifier: str, version: str) -> bool:
    """Return true if a version is allowed; a pre-release is, as containers bring them."""
    found = version_of(version)
    try:
        allowed = SpecifierSet(specifier)
    except InvalidSpecifier:
        return True
    if found is None:
        return True
    return allowed.contains(found, prereleases=True) or allowed.contains(
        found.base_version, prereleases=True
    )


def check_build(facts: EnvironmentFacts, host: str) -> Iterator[RuleMatch]:
    """Yield what keeps the packages that are missing from being compiled here."""
    torch, toolkit = facts.torch, facts.toolkit
    if torch is None or torch.cuda is None:
        return
    missing = [
        row for row in compat().compiled if not {row.name, *row.also} & facts.packages.keys()
    ]
    if not missing:
        return
    packages = ", ".join(row.name for row in missing)
    if toolkit.nvcc is not None and toolkit.nvcc != minor_of(torch.cuda):
        yield RuleMatch(
            "nvcc-differs",
            home=toolkit.cuda_home or "PATH",
            nvcc=toolkit.nvcc,
            torch=torch.version,
            cuda=torch.cuda,
        )
    needs = {
        "nvcc": toolkit.nvcc is not None,
        "g++": toolkit.compiler,
        "ninja": toolkit.ninja,
        "nccl.h": toolkit.nccl_header is not None,
    }
    if lacks := [name for name, is_there in needs.items() if not is_there]:
        verb = "is" if len(lacks) == 1 else "are"
        yield RuleMatch(
            "no-compiler",
            packages=packages,
            lacks=f"{', '.join(lacks)} {verb}",
            install="; ".join(_INSTALL[name].format(cuda=torch.cuda) for name in lacks),
        )
    fetched = [row for row in missing if row.wheel is not None]
    if toolkit.reaches_wheels is False and fetched:
        yield RuleMatch(
            "build-without-network",
            host=host,
            packages=", ".join(row.name for row in fetched),
            force=", ".join(row.force for row in fetched),
        )

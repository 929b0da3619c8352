"""Driver, CUDA, torch and GPUs against one another, and torch itself. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from packaging.version import Version

from pytest_megatron.base.text import listed
from pytest_megatron.doctor.facts import (
    Devices,
    EnvironmentFacts,
    Torch,
    compat,
    major_of,
    version_of,
)
from pytest_megatron.workloads.training.checks.rules import RuleMatch

_MOST_SHADOWS = 4
# What torch says when CUDA does not start -> what to do.
_STARTS = (
    ("802", "start nvidia-fabricmanager, of the driver's version: systemctl status it"),
    ("803", "restart the machine, or the container: driver and libcuda differ since an update"),
    ("804", "this GPU allows no compatibility package: take cuda-compat out of LD_LIBRARY_PATH"),
)
_ELSE = "run nvidia-smi; in a container, check that GPUs are given to it (--gpus all)"


def check_cuda(facts: EnvironmentFacts, env: Mapping[str, str]) -> Iterator[RuleMatch]:
    """Yield what is wrong between driver, CUDA and torch."""
    devices, torch = facts.devices, facts.torch
    if devices.problem is not None:
        yield RuleMatch("nvml-silent", driver=devices.driver, problem=devices.problem)
    for what in devices.ill:
        yield RuleMatch("gpu-ill", what=what)
    files = [str(path) for path in facts.machine.shadows]
    files = [file for file in files if file not in facts.python.not_preloaded]
    if files:
        yield RuleMatch("library-shadow", files=listed(files, _MOST_SHADOWS))
    if torch is None:
        yield RuleMatch("torch-missing", python=facts.python.executable)
        return
    is_shadowed = any(shadow.module == "torch" for shadow in facts.shadows)
    if torch.problem is not None and not is_shadowed:
        yield RuleMatch("torch-does-not-import", torch=torch.version, problem=torch.problem)
    if devices.driver is not None:
        yield from _driver(devices, torch)
        yield from _gpus(devices, torch, env)


def _driver(devices: Devices, torch: Torch) -> Iterator[RuleMatch]:
    """Compare the driver with the CUDA that torch was built with."""
    driver = version_of(devices.driver)
    if driver is None:
        return
    if torch.cuda is None:
        yield RuleMatch(
            "torch-for-cpu",
            torch=torch.version,
            public=torch.version.partition("+")[0],
            driver=devices.driver,
            fits=_fitting(driver),
        )
        return
    version, offered = version_of(torch.cuda), version_of(torch.driver_cuda)
    if version is None or (offered is not None and offered >= version):
        return  # a compatibility package is newer than the driver
    least = compat().least_driver.get(str(version.major))
    is_older = offered is None or offered.major < version.major  # libcuda, as far as it was asked
    if least is not None and driver < Version(least) and is_older:
        yield RuleMatch(
            "driver-too-old",
            driver=devices.driver,
            torch=torch.version,
            cuda=torch.cuda,
            package=torch.cuda.replace(".", "-"),
            least=least,
            fits=_fitting(driver),
        )
        return
    release = compat().release_driver.get(f"{version.major}.{version.minor}")
    if release is not None and driver < Version(release):
        yield RuleMatch(
            "driver-older-than-cuda", driver=devices.driver, cuda=torch.cuda, release=release
        )


def _fitting(driver: Version) -> str:
    """Return the newest CUDA that a driver was made for."""
    fits = [cuda for cuda, least in compat().release_driver.items() if driver >= Version(least)]
    return f"{max(fits, key=Version)} or older" if fits else "10 or older"


def _gpus(devices: Devices, torch: Torch, env: Mapping[str, str]) -> Iterator[RuleMatch]:
    """Compare the GPUs that the driver has with those that torch can use."""
    if torch.cuda is None or torch.problem is not None:
        return
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if torch.cuda_problem is not None:
        advice = next((text for code, text in _STARTS if code in torch.cuda_problem), _ELSE)
        if visible is not None:
            advice = f"unset CUDA_VISIBLE_DEVICES, which is {visible!r}; else {advice}"
        yield RuleMatch(
            "cuda-does-not-start", torch=torch.version, problem=torch.cuda_problem, advice=advice
        )
    elif torch.count < devices.num_nodes:
        named = devices.num_nodes if visible is None else len(visible.split(","))
        yield RuleMatch(
            "gpus-not-seen" if torch.count < named else "gpus-hidden",
            nodes=devices.num_nodes,
            count=torch.count,
            visible="not set" if visible is None else repr(visible),
        )
    for capability in sorted(set(torch.capabilities)):
        if torch.architectures and not _has_code(capability, torch.architectures):
            major, minor = capability
            yield RuleMatch(
                "gpu-too-new",
                capability=f"{major}.{minor}",
                torch=torch.version,
                architectures=", ".join(torch.architectures),
                wanted=f"{major}{minor}",
            )


def _has_code(capability: tuple[int, int], architectures: tuple[str, ...]) -> bool:
    """Return true if a GPU can run one of these: the same major version, or PTX to compile from.

    Source: CUDA C++ Programming Guide, compute capabilities; sm_90a runs on nothing but 9.0.
    """
    for name in architectures:
        kind, _, number = name.partition("_")
        digits = number.rstrip("af")
        if not digits.isdigit():
            continue
        built = (int(digits[:-1]), int(digits[-1]))
        if kind == "compute" and built <= capability:
            return True
        if kind == "sm" and built[0] == capability[0] and built <= capability:
            return True
    return False


def check_torch(facts: EnvironmentFacts, env: Mapping[str, str]) -> Iterator[RuleMatch]:
    """Yield what is wrong with how torch was installed."""
    torch = facts.torch
    yield from _doubles(facts, env)
    yield from _shadows(facts, env)
    if torch is None:
        return
    yield from _versions(facts, torch)
    brought = env.get("PYTORCH_VERSION")
    if brought and "NVIDIA_PYTORCH_VERSION" in env and not torch.version.startswith(brought):
        package = facts.packages.get("torch")
        location = package.location if package is not None else facts.python.prefix
        yield RuleMatch("torch-replaced", brought=brought, location=location, torch=torch.version)
    mixed: dict[str, list[str]] = {}
    for name, package in facts.packages.items():
        stem, _, major = name.rpartition("-cu")
        if stem.startswith("nvidia-") and major.isdigit():
            mixed.setdefault(stem, []).append(f"{name} {package.version}")
    several = [" and ".join(sorted(names)) for names in mixed.values() if len(names) > 1]
    if several:
        yield RuleMatch(
            "nvidia-wheels-mixed",
            packages="; ".join(sorted(several)),
            torch=torch.version,
            cuda=torch.cuda or "none",
        )
    nccl = facts.packages.get(f"nvidia-nccl-cu{major_of(torch.cuda)}")
    if nccl is not None and torch.nccl is not None and not _is_same(torch.nccl, nccl.version):
        yield RuleMatch(
            "nccl-differs", loaded=torch.nccl, package=nccl.name, installed=nccl.version
        )


def _doubles(facts: EnvironmentFacts, env: Mapping[str, str]) -> Iterator[RuleMatch]:
    """Distinguish an installation that was cut off from one environment on top of another."""
    for name, (first, *others) in facts.doubles.items():
        beside = [other for other in others if other.location == first.location]
        if beside:
            versions = " and ".join(package.version for package in (first, *beside))
            yield RuleMatch("installed-twice", package=name, versions=versions)
        elif _matters(name, first.version, others[0].version):
            yield RuleMatch(
                "in-front",
                package=name,
                first=f"{first.version} in {first.location}",
                second=f"{others[0].version} in {others[0].location}",
                advice=_way_out(first.location, None, facts, env),
            )


def _matters(name: str, first: str, second: str) -> bool:
    """Return true if two versions have different ABIs; numpy's differs between 1 and 2."""
    if name == "numpy":
        return major_of(first) != major_of(second)
    return name in ("torch", "megatron-core") and first != second


def _shadows(facts: EnvironmentFacts, env: Mapping[str, str]) -> Iterator[RuleMatch]:
    """Yield what is imported in place of installed packages."""
    for shadow in facts.shadows:
        advice = _way_out(shadow.path.parent, shadow.path, facts, env)
        package = shadow.package
        if package is not None:
            instead = f"not {package.name} {package.version} in {package.location}"
        elif facts.torch is not None and facts.torch.problem is not None:
            instead, advice = f"and {shadow.module} is not installed", f"{advice}; then install it"
        else:
            continue  # it works, whatever it is
        yield RuleMatch(
            "module-shadowed",
            module=shadow.module,
            path=shadow.path,
            instead=instead,
            advice=advice,
        )


def _way_out(
    directory: Path, module: Path | None, facts: EnvironmentFacts, env: Mapping[str, str]
) -> str:
    """Return what to do about a directory that is in front; `module` is what is no package."""
    start, *_ = facts.python.paths or (Path(),)
    words = [word for word in env.get("PYTHONPATH", "").split(":") if word]
    if directory in [(start / word).resolve() for word in words]:
        return f"take {directory} out of PYTHONPATH"
    if directory == start.resolve():
        what = "what is there" if module is None else str(module)
        return f"start in another directory than {directory}, or rename {what}"
    if module is not None:
        return f"remove or rename {module}"
    return "uninstall the one in front, or set PYTHONNOUSERSITE=1 if it is in ~/.local"


def _versions(facts: EnvironmentFacts, torch: Torch) -> Iterator[RuleMatch]:
    """Compare the versions that modules report with those installed in their place."""
    loaded = {"numpy": torch.numpy, "torch": None if torch.problem else torch.version}
    elsewhere = {shadow.module for shadow in facts.shadows}
    for name, text in loaded.items():
        package = facts.packages.get(name)
        if package is None or package.editable is not None or name in elsewhere:
            continue
        said, installed = version_of(text), version_of(package.version)
        if said and installed and said.base_version != installed.base_version:
            yield RuleMatch(
                "version-differs",
                package=name,
                said=text,
                installed=package.version,
                location=package.location,
            )


def _is_same(loaded: str, installed: str) -> bool:
    """Return true if two versions are one, as far as the library reports its own."""
    first, second = version_of(loaded), version_of(installed)
    return first is None or second is None or first.release[:3] == second.release[:3]

"""Driver, CUDA, torch and GPUs against one another, and torch itself. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from packaging.version import Version

from pytest_megatron.doctor.facts import (
    Devices,
    EnvironmentFacts,
    Torch,
    compat,
    version_of,
)
from pytest_megatron.workloads.training.checks.rules import RuleMatch

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
    if torch is None:
        yield RuleMatch("torch-missing", python=facts.python.executable)
        return
    if torch.problem is not None:
        yield RuleMatch("torch-does-not-import", torch=torch.version, problem=torch.problem)
    elif devices.driver is not None:
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


def _fitting(driver: Version) -> str:
    """Return the newest CUDA that a driver was made for."""
    fits = [cuda for cuda, least in compat().release_driver.items() if driver >= Version(least)]
    return f"{max(fits, key=Version)} or older" if fits else "10 or older"


def _gpus(devices: Devices, torch: Torch, env: Mapping[str, str]) -> Iterator[RuleMatch]:
    """Compare the GPUs that the driver has with those that torch can use."""
    if torch.cuda is None:
        return
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if torch.cuda_problem is not None:
        advice = next((text for code, text in _STARTS if code in torch.cuda_problem), _ELSE)
        if visible is not None:
            advice = f"unset CUDA_VISIBLE_DEVICES, which is {visible!r}; else {advice}"
        yield RuleMatch(
            "cuda-does-not-start", torch=torch.version, problem=torch.cuda_problem, advice=advice
        )
    else:
        named = devices.num_nodes if visible is None else len(visible.split(","))
        if torch.count < min(named, devices.num_nodes):
            yield RuleMatch(
                "gpus-not-seen",
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
    if torch is None:
        return
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

"""GPUs and processor of this machine, and the recipes' platform that they make.

Asks NVML and the system, never torch: the controller must not load it.
"""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

CPU_PLATFORM = "cpu"
# Platform of a recipe -> what NVML's name of its GPUs contains.
PLATFORM_GPUS: Mapping[str, str] = {
    "dgx_a100": "A100",
    "dgx_gb200": "GB200",
    "dgx_h100": "H100",
    "dgx_h200": "H200",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuModel:
    """Properties of a kind of GPU.

    Attributes:
        architecture: Major compute capability: 8 Ampere, 9 Hopper, 10 Blackwell.
        memory_gib: Of the largest of its name, as NVML gives it, in GiB, rounded up.
    """

    architecture: int
    memory_gib: int


# The word in a platform's name -> its GPUs. Source: NVIDIA's data sheets, nvidia-smi.
GPU_MODELS: Mapping[str, GpuModel] = {
    "v100": GpuModel(architecture=7, memory_gib=32),
    "a100": GpuModel(architecture=8, memory_gib=80),
    "h100": GpuModel(architecture=9, memory_gib=80),
    "h200": GpuModel(architecture=9, memory_gib=141),
    "gh200": GpuModel(architecture=9, memory_gib=141),
    "b200": GpuModel(architecture=10, memory_gib=186),
    "gb200": GpuModel(architecture=10, memory_gib=186),
    "b300": GpuModel(architecture=10, memory_gib=288),
    "gb300": GpuModel(architecture=10, memory_gib=288),
}


def gpu_model_of(platform_name: str) -> GpuModel | None:
    """Return the GPUs that a platform such as `dgx_h100` names; None for cpu and unknown ones."""
    words = platform_name.lower().replace("-", "_").split("_")
    return next((GPU_MODELS[word] for word in words if word in GPU_MODELS), None)


# Instructions by which kernels are chosen that round otherwise; a processor's name need not tell.
_VECTOR_FLAGS = ("asimd", "sve", "avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU as NVML sees it.

    Attributes:
        uuid: NVML's name for exactly this device, `GPU-...`.
        memory_bytes: All of its memory.
    """

    index: int
    name: str
    uuid: str
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """This machine, as far as goldens and placement care.

    Attributes:
        gpus: Those that CUDA_VISIBLE_DEVICES leaves; empty without an NVIDIA driver.
        driver: Version of the NVIDIA driver, or None.
        cpu: Model name of the processor.
        instructions: Those of the processor that decide how it rounds.
    """

    gpus: tuple[Gpu, ...]
    driver: str | None
    cpu: str
    instructions: str = ""

    def platform_class(self, platform_name: str) -> str:
        """Return what decides whether times and memory of two runs may be compared."""
        if platform_name == CPU_PLATFORM or not self.gpus:
            return f"{self.cpu} x{os.cpu_count()}"
        return self.gpus[0].name

    def fitting(self, platform_name: str) -> tuple[Gpu, ...]:
        """Return the GPUs that a workload of that platform may use."""
        wanted = PLATFORM_GPUS.get(platform_name)
        return tuple(g for g in self.gpus if wanted is None or wanted in g.name)

    def lacks(self, platform_name: str, num_gpus: int) -> str | None:
        """Return why a workload of that platform cannot run here, or None if it can."""
        if platform_name == CPU_PLATFORM or len(self.fitting(platform_name)) >= num_gpus:
            return None
        wanted = PLATFORM_GPUS.get(platform_name)
        here = f"{len(self.gpus)} x {self.gpus[0].name}" if self.gpus else "no GPU"
        return f"{platform_name} needs {num_gpus} x {wanted or 'GPU'}, this host has {here}"


@functools.cache
def this_host() -> Host:
    """Return this machine; asked once per process."""
    gpus, driver = _nvml()
    cpu = _cpu_line("model name") or platform.processor() or platform.machine()
    flags = _cpu_line("flags", "Features").split()
    instructions = " ".join(flag for flag in _VECTOR_FLAGS if flag in flags)
    return Host(gpus=gpus, driver=driver, cpu=cpu, instructions=instructions)


def has_driver() -> bool:
    """Return true if an NVIDIA driver is loaded, also as seen from a container."""
    return Path("/dev/nvidiactl").exists() or Path("/proc/driver/nvidia").exists()


def _nvml() -> tuple[tuple[Gpu, ...], str | None]:
    """Return the GPUs and the driver's version; nothing where there is no driver."""
    if not has_driver():
        return (), None  # saves the import on most machines
    import pynvml  # noqa: PLC0415 - see above

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return (), None
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        gpus = tuple(
            Gpu(
                index=index,
                name=_text(pynvml.nvmlDeviceGetName(handle)),
                uuid=_text(pynvml.nvmlDeviceGetUUID(handle)),
                memory_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
            )
            for index, handle in enumerate(handles)
        )
        return _visible(gpus), _text(pynvml.nvmlSystemGetDriverVersion())
    finally:
        pynvml.nvmlShutdown()


def _visible(gpus: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES leaves, in its order."""
    words = os.environ.get("CUDA_VISIBLE_DEVICES")
    if words is None:
        return gpus
    chosen: list[Gpu] = []
    for word in words.split(","):
        found = [
            g for g in gpus if word.strip() == str(g.index) or (word and g.uuid.startswith(word))
        ]
        if not found:
            break  # CUDA itself stops at the first word that it does not know
        chosen += found
    return tuple(chosen)


def _text(value: str | bytes) -> str:
    """Return NVML's answer as text; older bindings give bytes."""
    return value.decode() if isinstance(value, bytes) else value


def _cpu_line(*names: str) -> str:
    """Return the kernel's value for the first processor under one of `names`."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in names:
                return value.strip()
    except OSError:
        pass
    return ""

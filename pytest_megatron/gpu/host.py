"""GPUs and processor of this machine, the recipes' platform that they make, and leases of GPUs.

Asks NVML and the system, never torch: the controller must not load it.

Two runs on a host never share a device by accident. There is a lock file per device, locked by the
kernel: a process that dies in whatever way holds nothing any longer. The guard of a training
inherits the locks, so that they last until its ranks are gone.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import platform
import stat
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_megatron.errors import LaunchError

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
        memory_gib: Memory of the largest of its name, from NVML, in GiB, rounded up.
    """

    architecture: int
    memory_gib: int

    @property
    def memory_bytes(self) -> int:
        """Memory in bytes."""
        return self.memory_gib << 30


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


_DIRECTORY_VARIABLE = "PYTEST_MEGATRON_LEASES"
_WAITING_FILE = "waiting.lock"
_POLL_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Devices that are ours until `close`, for `contextlib.closing`.

    Attributes:
        gpus: In the order of the host; may be empty.
        descriptors: Open lock files, for a child process to inherit.
    """

    gpus: tuple[Gpu, ...]
    descriptors: tuple[int, ...]

    def close(self) -> None:
        """Let go of the devices, unless a child process still holds them."""
        for descriptor in self.descriptors:
            os.close(descriptor)


def lease_gpus(gpus: Sequence[Gpu], num_gpus: int, on_wait: Callable[[str], None]) -> Lease:
    """Wait until `num_gpus` of `gpus` are free, and hold them.

    All or none: a run that waits holds nothing, so that two that wait cannot block each other.

    Args:
        gpus: Any of these will do; at least `num_gpus` of them.
        num_gpus: May be 0.
        on_wait: Told once, if there is something to wait for.

    Raises:
        LaunchError: Lock files cannot be made.
    """
    assert len(gpus) >= num_gpus
    waiting: LeaseWaiter | None = None
    try:
        while (lease := try_lease(gpus, num_gpus)) is None:
            if waiting is None:
                on_wait(waiting_text(gpus, num_gpus))
                waiting = LeaseWaiter()
            time.sleep(_POLL_S)
    finally:
        if waiting is not None:
            waiting.close()
    return lease


def try_lease(gpus: Sequence[Gpu], num_gpus: int) -> Lease | None:
    """Hold `num_gpus` of `gpus`, or none and return None where fewer are free.

    Raises:
        LaunchError: Lock files cannot be made.
    """
    held: list[tuple[Gpu, int]] = []
    for gpu in gpus:
        if len(held) < num_gpus and (descriptor := _try_lock(f"{gpu.uuid}.lock")) is not None:
            held.append((gpu, descriptor))
    if len(held) == num_gpus:
        return Lease(gpus=tuple(g for g, _ in held), descriptors=tuple(d for _, d in held))
    for _, descriptor in held:
        os.close(descriptor)
    return None


def waiting_text(gpus: Sequence[Gpu], num_gpus: int) -> str:
    """Return the message for a user who has to wait."""
    return f"waiting for {num_gpus} of {len(gpus)} GPUs; other runs hold the rest"


class LeaseWaiter:
    """Lets other runs know, until `close`, that somebody waits for devices.

    Who holds devices and has nothing to run lets go of them then. The kernel ends it with the
    process that waits.
    """

    def __init__(self) -> None:
        self._descriptor = _open_lock_file(_WAITING_FILE)
        fcntl.flock(self._descriptor, fcntl.LOCK_SH)  # who looks holds it for a moment only

    def close(self) -> None:
        """Wait no longer."""
        os.close(self._descriptor)


def is_awaited() -> bool:
    """Return true if some run on this host waits for devices.

    Raises:
        LaunchError: Lock files cannot be made.
    """
    descriptor = _try_lock(_WAITING_FILE)
    if descriptor is None:
        return True
    os.close(descriptor)
    return False


def lease_directory() -> Path:
    """Return where the lock files are; `PYTEST_MEGATRON_LEASES` names another place."""
    named = os.environ.get(_DIRECTORY_VARIABLE)
    return Path(named) if named else Path(tempfile.gettempdir()) / "pytest-megatron-leases"


def _try_lock(name: str) -> int | None:
    """Lock a file; return it open, or None where another process has it."""
    descriptor = _open_lock_file(name)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _open_lock_file(name: str) -> int:
    """Open a file for locks among all users of the host."""
    directory = lease_directory()
    try:
        if not directory.is_dir():
            directory.mkdir(parents=True, exist_ok=True)
            directory.chmod(0o1777)  # other users of the host lease the same devices
        return _open(_own_directory(directory) / name)
    except OSError as error:
        raise LaunchError(
            str(error.filename or directory),
            f"{error.strerror}; set {_DIRECTORY_VARIABLE} to a directory for GPU locks",
        ) from error


def _own_directory(directory: Path) -> Path:
    """Return the directory, which in a place of everybody's must be none that a link leads to.

    Raises:
        OSError: It is a link.
    """
    if _DIRECTORY_VARIABLE not in os.environ and directory.is_symlink():
        raise OSError(errno.ELOOP, "is a link, expected a directory", str(directory))
    return directory


def _open(path: Path) -> int:
    """Open a lock file for locking; another user's can be read, but not written or made again.

    The directory is everybody's: a link would have us make a file wherever it leads, and opening a
    FIFO would wait for ever.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        descriptor = os.open(path, flags | os.O_CREAT, 0o644)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(errno.ELOOP, "is a link, expected a lock file", str(path)) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is no regular file, expected a lock file", str(path))
    return descriptor

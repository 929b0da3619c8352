"""Facts about a machine and an environment, their source, and tables of compatible versions.

A fact that is not known is None.
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from packaging.version import InvalidVersion, Version

from pytest_megatron.base.schema import trusted
from pytest_megatron.gpu.host import Gpu


@dataclass(frozen=True, slots=True, kw_only=True)
class Python:
    """The interpreter of the environment.

    Attributes:
        tag: Tag in the names of wheels: `cp312`.
        paths: Where it imports from, in order, the current directory first.
    """

    executable: Path
    version: str
    tag: str
    machine: str
    prefix: Path
    paths: tuple[Path, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """One installed distribution.

    Attributes:
        name: Normalised: `flash-attn`.
    """

    name: str
    version: str
    location: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Torch:
    """The torch of the environment.

    Attributes:
        version: Version that it reports, else the installed one: `2.13.0+cpu`.
        cuda: That it was built with, None for a CPU build.
        abi: Whether it was built with C++11's strings.
        driver_cuda: What libcuda offers.
        count: GPUs that it sees.
        capabilities: Capability of each GPU: (9, 0).
        architectures: That it has code for: `sm_90`.
        problem: Why it cannot be imported; `cuda_problem`: why CUDA does not start.
        imports: Module of an extension -> why it cannot be imported, None where it can.
    """

    version: str
    cuda: str | None = None
    abi: bool | None = None
    nccl: str | None = None
    cudnn: str | None = None
    driver_cuda: str | None = None
    count: int = 0
    capabilities: tuple[tuple[int, int], ...] = ()
    architectures: tuple[str, ...] = ()
    problem: str | None = None
    cuda_problem: str | None = None
    imports: Mapping[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """GPUs and driver, as the driver reports them.

    Attributes:
        driver: Version of the kernel's module.
        num_nodes: Device files `/dev/nvidia0` and so on.
        gpus: GPUs in the order of NVML.
        problem: Why NVML does not answer, where it does not.
        ill: Problems of GPUs that NVML reports, a text each.
    """

    driver: str | None = None
    num_nodes: int = 0
    gpus: tuple[Gpu, ...] = ()
    problem: str | None = None
    ill: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """A directory that is written to.

    Attributes:
        use: What for.
        variable: Names another place for it; empty if none does.
        problem: Why nothing can be written there.
    """

    use: str
    path: Path
    variable: str = ""
    free_bytes: int | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """The system around the environment.

    Attributes:
        limits: Soft limits of `/proc/self/limits` by name, None for unlimited.
        interfaces: Network interfaces that are up, without loopback.
        container: What kind of container this is; None on a bare host.
        host_problem: Why this host's own name does not resolve.
    """

    limits: Mapping[str, int | None] = field(default_factory=dict)
    shm_bytes: int | None = None
    disks: tuple[Disk, ...] = ()
    interfaces: tuple[str, ...] = ()
    has_infiniband: bool = False
    container: str | None = None
    host_problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Slurm:
    """Slurm's client.

    Attributes:
        programs: Those that are on PATH.
        problem: Why the controller does not answer.
    """

    programs: tuple[str, ...] = ()
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveProbe:
    """One all_reduce.

    Attributes:
        problem: Why it failed, None where it is right.
    """

    backend: str
    world_size: int
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentFacts:
    """All of it.

    Attributes:
        git_fix: Command that lets git read the project, where it refuses by the owner.
        megatrons: Directories that `megatron.core` is found in, in order of import.
    """

    python: Python
    packages: Mapping[str, Package] = field(default_factory=dict)
    megatrons: tuple[Path, ...] = ()
    torch: Torch | None = None
    devices: Devices = field(default_factory=Devices)
    machine: MachineFacts = field(default_factory=MachineFacts)
    slurm: Slurm = field(default_factory=Slurm)
    git_fix: str | None = None
    collectives: tuple[CollectiveProbe, ...] = ()


def version_of(text: str | None) -> Version | None:
    """Return a version, None where the text is none."""
    try:
        return Version(text) if text else None
    except InvalidVersion:
        return None


def major_of(text: str | None) -> str | None:
    """Return `12` of `12.8`."""
    return text.partition(".")[0] if text else None


def minor_of(text: str | None) -> str | None:
    """Return major and minor version: `12.8` of `12.8.1+cu128`."""
    version = version_of(text)
    return f"{version.major}.{version.minor}" if version else None


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemView:
    """Everything that a probe looks at.

    Attributes:
        python: The interpreter of the environment.
        project: The directory that trainings are started in.
        root: What `/proc`, `/sys`, `/dev`, `/run` and `/usr` are below.
        env: Variables; its `PATH` is where programs are looked for.
        home: For caches that no variable names.
        temporary: The directory for temporary files.
        import_limit_s: Time limit for torch and its extensions to be imported; a fifth of it for
            each extension.
        collective_limit_s: Time limit for one all_reduce with all that it starts.
    """

    python: Path
    project: Path = field(default_factory=Path.cwd)
    root: Path = Path("/")
    env: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    home: Path = field(default_factory=Path.home)
    temporary: Path = field(default_factory=lambda: Path(tempfile.gettempdir()))
    import_limit_s: float = 300.0
    collective_limit_s: float = 120.0

    def under(self, path: str) -> Path:
        """Return an absolute path of the machine that is looked at."""
        return self.root / path.lstrip("/")

    def read(self, path: str) -> str:
        """Return a file of the machine, empty where there is none."""
        try:
            return self.under(path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""


def here(python: Path | None = None) -> SystemView:
    """Return this machine, and the environment of `python`; by default the one that runs this."""
    return SystemView(python=python or Path(sys.executable))


TABLE = Path(__file__).parent / "compat.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """A package that is compiled against torch.

    Attributes:
        name: Name of the distribution; `also`: other distributions of the same code.
        modules: Whose import shows that it works.
        wheel: Template of the names of published wheels, None where none are published.
        build: The command that compiles it, where that is the only way.
        needs: Arguments of a training that cannot do without it.
    """

    name: str
    also: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    wheel: str | None = None
    build: str | None = None
    latest: str
    force: str
    needs: tuple[str, ...] = ()
    why: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Compat:
    """The tables.

    Attributes:
        least_driver: CUDA's major version -> the least driver.
        release_driver: CUDA's version -> the driver that its release came with.
    """

    least_driver: Mapping[str, str]
    release_driver: Mapping[str, str]
    compiled: tuple[Compiled, ...]


@functools.cache
def compat() -> Compat:
    """Return the built-in tables."""
    return trusted(Compat, tomllib.loads(TABLE.read_text(encoding="utf-8")))

"""Where and with what a run happens: commit, versions, hardware.

For `plan.json`, `run.json` and goldens. Asks git and the installed packages' metadata; imports none
of the packages.
"""

from __future__ import annotations

import datetime as dt
import functools
import importlib.metadata
import os
import platform
from dataclasses import dataclass
from pathlib import Path

from pytest_megatron.files import JsonValue
from pytest_megatron.git import ask_git
from pytest_megatron.host import CPU_PLATFORM, Host, this_host

_PACKAGES = (
    "pytest-megatron",
    "torch",
    "megatron-core",
    "transformer-engine",
    "nvidia-nccl-cu13",
    "nvidia-cudnn-cu13",
    "numpy",
    "pytest",
    "triton",
)
_IMAGE_VARIABLES = ("PYTEST_MEGATRON_IMAGE", "NVIDIA_PYTORCH_VERSION", "SLURM_CONTAINER_IMAGE")


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionFacts:
    """The surroundings of a run.

    Attributes:
        commit: Of the project's checkout; None outside of git.
        is_dirty: Whether files differ from that commit or new ones are not ignored; goldens do not
            count, since they come of the run.
        image: The container image, where the environment names one.
    """

    commit: str | None
    is_dirty: bool
    image: str | None
    host: Host
    python: str
    versions: dict[str, str]

    def versions_on(self, platform_name: str) -> dict[str, str]:
        """Return what decides how a workload of that platform rounds, and the other versions."""
        if platform_name != CPU_PLATFORM or not self.host.instructions:
            return dict(self.versions)
        return self.versions | {"cpu": self.host.instructions}

    def as_json(self) -> dict[str, JsonValue]:
        """Return the facts for a file."""
        return {
            "commit": self.commit,
            "is_dirty": self.is_dirty,
            "image": self.image,
            "python": self.python,
            "versions": dict(self.versions),
            "driver": self.host.driver,
            "gpus": [f"{gpu.name}" for gpu in self.host.gpus],
            "cpu": self.host.cpu,
            "num_cpus": os.cpu_count(),
        }


@functools.cache
def gather_facts(root: Path) -> SessionFacts:
    """Ask git, the packages and the host; once per process."""
    status = ask_git(root, "status", "--porcelain", "--", ".", ":(exclude)golden_values")
    return SessionFacts(
        commit=ask_git(root, "rev-parse", "HEAD"),
        is_dirty=bool(status),
        image=next((os.environ[name] for name in _IMAGE_VARIABLES if name in os.environ), None),
        host=this_host(),
        python=platform.python_version(),
        versions={name: version for name in _PACKAGES if (version := _version(name))},
    )


def utc_now() -> str:
    """Return the time as `2026-01-31T12:00:00Z`."""
    return dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None

"""Real virtual environments with made-up packages, and a made-up machine around them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from pytest_megatron.doctor.facts import SystemView

LIMITS = """\
Limit                     Soft Limit           Hard Limit           Units
Max processes             {nproc:<20} unlimited            processes
Max open files            {nofile:<20} 1048576              files
Max locked memory         {memlock:<20} unlimited            bytes
"""
_TORCH = """
from . import version
__version__ = {version!r}
def compiled_with_cxx11_abi(): return True
class backends:
    class cudnn:
        version = staticmethod(lambda: 91000)
class cuda:
    class nccl:
        version = staticmethod(lambda: {nccl!r})
    device_count = staticmethod(lambda: {count!r})
    get_arch_list = staticmethod(lambda: {architectures!r})
    get_device_capability = staticmethod(lambda index: {capability!r})
    @staticmethod
    def init():
        if {cuda_problem!r}: raise RuntimeError({cuda_problem!r})
"""


class Staged:
    """An environment, a project and a machine in which nothing is wrong, to be broken."""

    def __init__(self, template: Path, directory: Path) -> None:
        self.venv, self.root, self.project = (directory / n for n in ("venv", "root", "project"))
        shutil.copytree(template, self.venv, symlinks=True)
        self.project.mkdir()
        self.site = self.venv / f"lib/python3.{sys.version_info[1]}/site-packages"
        self.env = {"PATH": str(directory / "bin"), "LC_ALL": "C.UTF-8"}
        self.bin = directory / "bin"
        self.bin.mkdir()
        self.import_limit_s = 60.0
        self.limits()
        self.file("/proc/mounts", "shm /dev/shm tmpfs rw,nosuid,size=16777216k 0 0\n")
        self.file("/sys/class/net/eth0/operstate", "up\n")
        self.file("/sys/class/net/lo/operstate", "unknown\n")

    @property
    def places(self) -> SystemView:
        return SystemView(
            python=self.venv / "bin/python",
            project=self.project,
            root=self.root,
            env=self.env,
            home=self.project,
            temporary=self.project,
            import_limit_s=self.import_limit_s,
        )

    def file(self, path: str, text: str) -> None:
        place = self.root / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)

    def program(self, name: str, text: str) -> None:
        path = self.bin / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    def git(self) -> None:
        """Make the project a checkout, and have git read no configuration but its own."""
        git = shutil.which("git")
        assert git is not None
        self.program("git", f'exec {git} "$@"')
        self.env |= {"GIT_CONFIG_NOSYSTEM": "1", "HOME": str(self.root)}
        self.root.mkdir(exist_ok=True)
        subprocess.run([git, "init", "--quiet", self.project], check=True)

    def limits(
        self, nofile: str = "1048576", nproc: str = "unlimited", memlock: str = "unlimited"
    ) -> None:
        self.file("/proc/self/limits", LIMITS.format(nofile=nofile, nproc=nproc, memlock=memlock))

    def driver(self, version: str, num_gpus: int = 2) -> None:
        self.file(
            "/proc/driver/nvidia/version",
            f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {version}  Wed\nGCC version: 12\n",
        )
        for index in range(num_gpus):
            self.file(f"/dev/nvidia{index}", "")

    def torch(
        self,
        version: str = "2.8.0+cu128",
        *,
        cuda: str | None = "12.8",
        count: int = 2,
        capability: tuple[int, int] = (9, 0),
        cuda_problem: str = "",
        code: str = "",
    ) -> None:
        self.package("torch", version)
        directory = self.site / "torch"
        directory.mkdir()
        (directory / "version.py").write_text(f"cuda: str = {cuda!r}\n")
        text = _TORCH.format(
            version=version,
            nccl=(2, 27, 3),
            count=count,
            architectures=["sm_80", "sm_90"] if cuda else [],
            capability=capability,
            cuda_problem=cuda_problem,
        )
        (directory / "__init__.py").write_text(f"{code}\n{text}")

    def package(self, name: str, version: str) -> None:
        directory = self.site / f"{name.replace('-', '_')}-{version}.dist-info"
        directory.mkdir(parents=True)
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (directory / "METADATA").write_text(text)

    def megatron(self, directory: Path) -> None:
        (directory / "megatron/core").mkdir(parents=True)
        (directory / "megatron/core/__init__.py").write_text("")

"""Real virtual environments with made-up packages, and a made-up machine around them."""

from __future__ import annotations

import shutil
import struct
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from pytest_megatron.doctor.facts import SystemView

TAG = f"cp{sys.version_info[0]}{sys.version_info[1]}"
NEW_ERROR = "_ZN3c105ErrorC2ENS_14SourceLocationENSt7__cxx1112basic_stringIcEE"
OLD_ERROR = "_ZN3c105ErrorC2ENS_14SourceLocationESs"
LIMITS = """\
Limit                     Soft Limit           Hard Limit           Units
Max processes             {nproc:<20} unlimited            processes
Max open files            {nofile:<20} 1048576              files
Max locked memory         {memlock:<20} unlimited            bytes
"""
_TORCH = """
from . import version
__version__ = {version!r}
def compiled_with_cxx11_abi(): return {abi!r}
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
        self.file("/proc/sys/net/ipv4/ip_local_port_range", "32768\t60999\n")
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
            wheel_host=("127.0.0.1", 9),
            rendezvous_port=0,
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

    def torch(  # noqa: PLR0913 - each is one thing that can be wrong
        self,
        version: str = "2.8.0+cu128",
        *,
        cuda: str | None = "12.8",
        abi: bool = True,
        count: int = 2,
        capability: tuple[int, int] = (9, 0),
        cuda_problem: str = "",
        code: str = "",
        requires: Iterable[str] = (),
        directory: Path | None = None,
    ) -> None:
        self.package("torch", version, requires=requires, directory=directory)
        directory = (directory or self.site) / "torch"
        directory.mkdir()
        (directory / "version.py").write_text(f"cuda: str = {cuda!r}\n")
        text = _TORCH.format(
            version=version,
            abi=abi,
            nccl=(2, 27, 3),
            count=count,
            architectures=["sm_80", "sm_90"] if cuda else [],
            capability=capability,
            cuda_problem=cuda_problem,
        )
        (directory / "__init__.py").write_text(f"{code}\n{text}")

    def package(  # noqa: PLR0913 - each is one thing that can be wrong
        self,
        name: str,
        version: str,
        *,
        tag: str = "py3-none-any",
        requires: Iterable[str] = (),
        python: str = ">=3.10",
        modules: Iterable[str] = (),
        directory: Path | None = None,
    ) -> None:
        site = directory or self.site
        directory = site / f"{name.replace('-', '_')}-{version}.dist-info"
        directory.mkdir(parents=True)
        lines = [f"Name: {name}", f"Version: {version}", f"Requires-Python: {python}"]
        lines += [f"Requires-Dist: {requirement}" for requirement in requires]
        (directory / "METADATA").write_text("Metadata-Version: 2.1\n" + "\n".join(lines) + "\n")
        (directory / "WHEEL").write_text(f"Wheel-Version: 1.0\nTag: {tag}\n")
        for module in modules:
            (site / f"{module}.py").write_text("")

    def shared_object(
        self,
        path: str,
        *,
        needed: Iterable[str] = (),
        missing: Iterable[str] = (),
        defined: Iterable[str] = (),
    ) -> None:
        place = self.site / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(shared_object(list(needed), list(missing), list(defined)))

    def megatron(self, directory: Path) -> None:
        (directory / "megatron/core").mkdir(parents=True)
        (directory / "megatron/core/__init__.py").write_text("")

    def locked(self, *dependencies: str, locked: str, others: str = "") -> None:
        """Write a project, and a lock of it that was made of the specifiers in `locked`."""
        words = ", ".join(f'"{text}"' for text in dependencies)
        (self.project / "pyproject.toml").write_text(
            f'[project]\nname = "mine"\ndependencies = [{words}]\n'
        )
        (self.project / "uv.lock").write_text(
            f'[[package]]\nname = "mine"\nsource = {{ virtual = "." }}\n{locked}\n{others}'
        )
        with (self.venv / "pyvenv.cfg").open("a") as file:
            file.write("uv = 0.9.0\n")


def shared_object(needed: list[str], missing: list[str], defined: list[str]) -> bytes:
    """Return an ELF64 file with nothing in it but what it needs and offers."""
    texts, places = b"\0", {}
    for text in (*needed, *missing, *defined):
        places[text] = len(texts)
        texts += text.encode() + b"\0"
    symbols = struct.pack("<IBBHQQ", 0, 0, 0, 0, 0, 0)
    for text in missing:
        symbols += struct.pack("<IBBHQQ", places[text], 0x12, 0, 0, 0, 0)
    for text in defined:
        symbols += struct.pack("<IBBHQQ", places[text], 0x12, 0, 7, 0, 0)
    dynamic = b"".join(struct.pack("<qQ", 1, places[text]) for text in needed)
    dynamic += struct.pack("<qQ", 0, 0)
    at_texts, at_symbols = 64, 64 + len(texts)
    at_dynamic = at_symbols + len(symbols)
    sections = [
        (0, 0, 0, 0),
        (3, at_texts, len(texts), 0),
        (11, at_symbols, len(symbols), 1),
        (6, at_dynamic, len(dynamic), 1),
    ]
    table = b"".join(
        struct.pack("<IIQQQQIIQQ", 0, kind, 0, 0, at, length, link, 0, 8, 0)
        for kind, at, length, link in sections
    )
    at_table = at_dynamic + len(dynamic)
    header = b"\x7fELF\x02\x01\x01" + bytes(9)
    header += struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 0, at_table, 0, 64, 0, 0, 64, 4, 0)
    return header + texts + symbols + dynamic + table

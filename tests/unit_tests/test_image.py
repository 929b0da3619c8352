"""The CI image: its environment, made in a container that is only pretended, and its Dockerfile."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INSTALL = ROOT / "docker" / "install.py"
UV = Path(sys.executable).with_name("uv")
NGC_TORCH = "2.8.0a0+5228986c39.nv25.6"
# What `uv` would do if the lock's torch came along after all.
CARELESS_UV = """\
#!/usr/bin/env bash
case $1 in
    export) touch "${!#}" ;;
    pip) site=$(echo "$VENV"/lib/python*/site-packages)
        cp -r "$OTHER"/. "$site" ;;
esac
"""


@dataclass(frozen=True, kw_only=True)
class Container:
    """A directory that a Python takes for its own packages."""

    packages: Path
    venv: Path

    def add(self, name: str, version: str, where: Path | None = None) -> None:
        """Add a package that can be imported and says its version."""
        site = where or self.packages
        (site / name).mkdir(parents=True)
        (site / name / "__init__.py").write_text(f"__version__ = {version!r}\n")
        info = site / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    def install(self, uv: Path, **env: str) -> subprocess.CompletedProcess[str]:
        """Run the image's step."""
        python = sys._base_executable  # type: ignore[attr-defined] # the one that has no venv
        base = self.packages.parents[2]
        return subprocess.run(
            [python, str(INSTALL), str(uv), str(self.venv)],
            env={**os.environ, "PYTHONUSERBASE": str(base), "VENV": str(self.venv), **env},
            capture_output=True,
            text=True,
            check=False,
        )

    def ask(self, code: str) -> str:
        """What the environment's Python prints."""
        env = {**os.environ, "PYTHONUSERBASE": str(self.packages.parents[2])}
        command = [str(self.venv / "bin" / "python"), "-c", code]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def container(tmp_path: Path) -> Container:
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    packages = tmp_path / "usr" / "lib" / version / "site-packages"
    packages.mkdir(parents=True)
    return Container(packages=packages, venv=tmp_path / "venv")


def test_the_environment_has_the_container_s_torch_and_the_lock_s_rest(
    container: Container,
) -> None:
    container.add("torch", NGC_TORCH)
    container.add("numpy", "1.26.4")
    container.add("click", "7.0")
    done = container.install(UV)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    printed = container.ask(
        "import torch, numpy, click, pydantic\n"
        "from importlib.metadata import version\n"
        "print(torch.__version__, numpy.__version__, version('click'))"
    )
    locked = re.search(r'name = "click"\nversion = "(.*)"', (ROOT / "uv.lock").read_text())
    assert locked is not None
    assert printed.split() == [NGC_TORCH, "1.26.4", locked[1]]
    site = next(container.venv.glob("lib/python*/site-packages"))
    assert list(site.glob("torch*")) + list(site.glob("nvidia*_cu*")) == []


def test_an_environment_that_replaces_torch_fails_the_build(
    container: Container, tmp_path: Path
) -> None:
    container.add("torch", NGC_TORCH)
    container.add("torch", "2.13.0", where=tmp_path / "other")
    uv = tmp_path / "uv"
    uv.write_text(CARELESS_UV)
    uv.chmod(0o755)
    done = container.install(uv, OTHER=str(tmp_path / "other"))
    assert (done.returncode, done.stdout) == (1, "")
    assert "install.py: the container's packages were replaced; torch: " in done.stderr
    assert "became ['2.13.0'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("version", "text"),
    [
        pytest.param(None, "BASE must be an image with torch", id="none"),
        pytest.param("2.1.0a0", "torch 2.1.0a0, which is older than 2.6", id="old"),
    ],
)
def test_a_container_without_a_torch_of_use_fails_the_build(
    container: Container, version: str | None, text: str
) -> None:
    if version is not None:
        container.add("torch", version)
    done = container.install(UV)
    assert (done.returncode, done.stdout) == (1, "")
    assert text in done.stderr
    assert "Traceback" not in done.stderr


def test_the_image_has_the_uv_of_the_project() -> None:
    pinned = [
        re.search(pattern, (ROOT / file).read_text(), re.MULTILINE)
        for file, pattern in (
            ("dev.py", r'^UV_VERSION = "(.*)"'),
            ("docker/Dockerfile", r"^ARG UV_VERSION=(.*)"),
        )
    ]
    assert all(pinned)
    assert len({found[1] for found in pinned if found}) == 1

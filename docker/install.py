"""Makes the environment of the CI image: the container's torch, everything else from `uv.lock`.

An NGC image has a torch of its own, built for its CUDA, NCCL and Transformer Engine. A wheel from a
package index in its place works until it does not, and brings gigabytes of CUDA a second time. So
the environment sees the container's packages, uv adds what the lock has beside torch's world, and
the build fails if torch is not exactly what it was, or if something that is needed is missing.

    install.py UV VENV [--extra NAME]... [--group NAME]...

Runs on the container's Python and imports nothing but the standard library.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# What belongs to the container's torch, whether the container has it as a package or otherwise.
_OF_TORCH = re.compile(
    r"(torch|torchvision|torchaudio|(pytorch-)?triton|nvidia-(?!ml-py|resiliency).*|cuda-.*"
    r"|transformer-engine.*|flash-attn.*|apex|causal-conv1d|mamba-ssm|grouped-gemm)"
)
_IF_THERE = ("numpy",)  # torch's neighbours are compiled against it
_LOWEST_TORCH = (2, 6)
_ASK = """
import json, sys, torch
sys.path[:0] = [sys.argv[1]]
from install import kept_packages
print(json.dumps({"torch": [torch.__version__, torch.__file__], **kept_packages()}))
"""


class BuildError(Exception):
    """The image cannot be built like this."""


def main(words: list[str]) -> int:
    """Make the environment; return the exit code."""
    parser = argparse.ArgumentParser(prog="install.py")
    parser.add_argument("uv")
    parser.add_argument("venv", type=Path)
    parser.add_argument("--extra", action="append", default=[])
    parser.add_argument("--group", action="append", default=[])
    parser.add_argument("--check", action="store_true", help="only look for what is missing")
    found = parser.parse_args(words)
    try:
        if found.check:
            require_complete(found.venv)
        else:
            install(found.uv, found.venv, found.extra, found.group)
    except BuildError as error:
        print(f"install.py: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"install.py: failed at: {' '.join(map(str, error.cmd))}", file=sys.stderr)
        return 1
    return 0


def install(uv: str, venv: Path, extras: list[str], groups: list[str]) -> None:
    """Make the environment.

    Raises:
        BuildError: The container has no torch, an old one, or not the same one as before.
        subprocess.CalledProcessError: A step failed.
    """
    before = _ask(Path(sys.executable))
    _require_torch(before["torch"][0])
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", "--system-site-packages", venv], check=True
    )
    python = venv / "bin" / "python"
    with tempfile.TemporaryDirectory() as directory:
        requirements = Path(directory) / "requirements.txt"
        _export(uv, requirements, extras, groups, kept=sorted(before))
        command = [uv, "pip", "install", "--no-config", "--no-deps", "--require-hashes"]
        subprocess.run([*command, "--python", python, "-r", requirements], check=True)
    if (after := _ask(python)) != before:
        changed = sorted(k for k in {*before, *after} if before.get(k) != after.get(k))
        lines = [f"{name}: {before.get(name)} became {after.get(name)}" for name in changed]
        raise BuildError(f"the container's packages were replaced; {'; '.join(lines)}")
    subprocess.run([python, __file__, uv, venv, "--check"], check=True)


def kept_packages() -> dict[str, list[str]]:
    """Return the version and place of the packages that are to stay as they are."""
    found = {}
    for package in importlib.metadata.distributions():
        name = re.sub(r"[-_.]+", "-", package.metadata["Name"]).lower()
        if name not in found and (_OF_TORCH.fullmatch(name) or name in _IF_THERE):
            found[name] = [package.version, str(package.locate_file(""))]
    return found


def require_complete(venv: Path) -> None:
    """See that what the environment's own packages need is there; runs in the environment.

    Raises:
        BuildError: Something is missing or too old.
    """
    from packaging.requirements import Requirement  # noqa: PLC0415 - only there

    with (ROOT / "pyproject.toml").open("rb") as file:
        overridden = tomllib.load(file)["tool"]["uv"].get("override-dependencies", [])
    ignored = {Requirement(text).name for text in overridden}
    problems = []
    for package in importlib.metadata.distributions(path=_own_paths(venv)):
        for text in package.requires or []:
            needed = Requirement(text)
            if needed.name in ignored or (needed.marker and not needed.marker.evaluate()):
                continue
            try:
                version = importlib.metadata.version(needed.name)
            except importlib.metadata.PackageNotFoundError:
                problems.append(f"{package.name} needs {needed.name}, which is not there")
                continue
            if not needed.specifier.contains(version, prereleases=True):
                problems.append(f"{package.name} needs {needed}, the container has {version}")
    if problems:
        raise BuildError("; ".join(sorted(problems)))


def _own_paths(venv: Path) -> list[str]:
    return [path for path in sys.path if Path(path).is_relative_to(venv.resolve())]


def _export(
    uv: str, target: Path, extras: list[str], groups: list[str], *, kept: list[str]
) -> None:
    """Write what the lock has beside torch's world and what the container keeps.

    Raises:
        BuildError: Something of torch's world is needed by another package as well.
    """
    words = [word for extra in extras for word in ("--extra", extra)]
    words += [word for group in groups for word in ("--group", group)]
    words += [word for name in kept for word in ("--no-emit-package", name)]
    command = [uv, "export", "--quiet", "--frozen", "--no-emit-project", "--no-default-groups"]
    subprocess.run(
        [*command, "--prune", "torch", *words, "--output-file", target], check=True, cwd=ROOT
    )
    names = re.findall(r"^([A-Za-z0-9][\w.-]*)==", target.read_text(), re.MULTILINE)
    if astray := [name for name in names if _OF_TORCH.fullmatch(name.lower())]:
        raise BuildError(f"the lock would bring {', '.join(astray)} beside the container's torch")


def _require_torch(version: str) -> None:
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if numbers < _LOWEST_TORCH:
        raise BuildError(f"the container has torch {version}, which is older than 2.6; use another")


def _ask(python: Path) -> dict[str, list[str]]:
    """Return what a Python sees of torch's world."""
    done = subprocess.run(
        [python, "-P", "-c", _ASK, Path(__file__).parent],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise BuildError(f"{python} cannot import torch ({last}); BASE must be an image with torch")
    found: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

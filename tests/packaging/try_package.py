"""Builds the wheel and the sdist, and tries them as a stranger gets them.

    python tests/packaging/try_package.py [--keep DIR]

Builds twice, the second time from the unpacked sdist, elsewhere and under another umask: the same
bytes have to come out. Then `twine check`, and an environment that has the wheel and what the lock
gives it, without torch, in which commands run with a home that cannot be written to. Last, a test
on two ranks in that environment with the torch of the Python that runs this program. Needs the
package index for hatchling and twine. Exits with 1 at the first thing that is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
UV = shutil.which("uv", path=f"{BIN}{os.pathsep}{os.environ['PATH']}") or "uv"
TWINE = "twine>=7,<8"
# Beside the package: what a checkout needs to be tested and to be built again.
IN_SDIST = (
    *(".ci/run", "CONTRIBUTING.md", "LICENSE", "README.md", "conftest.py", "dev.py", "uv.lock"),
    *(
        "docs/index.md",
        "golden_values/gpt",
        "pyproject.toml",
        "recipes/gpt.yaml",
        "tests/unit_tests",
    ),
)
IN_WHEEL = (
    *("gangs/rank/bootstrap.py", "session/options.py", "plugin.py", "py.typed"),
    *("schemas/recipe.schema.json", "pages/templates/page.html", "triage/signatures.toml"),
)
NEEDS_TORCH = "No module named 'torch'"
TEST = """
import torch
import torch.distributed as dist


def test_sum(process_group, device, rank, world_size):
    value = torch.tensor([float(rank)], device=device)
    dist.all_reduce(value)
    assert (value.item(), world_size) == (1.0, 2)
"""


class PackageError(Exception):
    """Something about the packages is not as it must be."""


def main() -> int:
    """Build and try; return the exit code."""
    parser = argparse.ArgumentParser(prog="try_package.py")
    parser.add_argument("--keep", type=Path, help="directory that gets the wheel and the sdist")
    keep = parser.parse_args().keep
    try:
        with tempfile.TemporaryDirectory(prefix="package-") as directory:
            try_all(Path(directory), keep)
    except PackageError as error:
        print(f"package: {error}", file=sys.stderr)
        return 1
    return 0


def try_all(work: Path, keep: Path | None) -> None:
    """Build, compare, check, install and run.

    Raises:
        PackageError: Something is not as it must be.
    """
    with step("builds, and again from the sdist, are the same bytes"):
        wheel, sdist = build(ROOT, work / "first", umask=0o022)
        with tarfile.open(sdist) as archive:
            archive.extractall(work / "unpacked", filter="data")
        (tree,) = (work / "unpacked").iterdir()
        for one, other in zip(
            (wheel, sdist), build(tree, work / "second", umask=0o077), strict=True
        ):
            require_equal(one, other)
    with step("hold what they must"):
        require_in(sdist, [f"{tree.name}/{name}" for name in IN_SDIST])
        require_in(wheel, [f"pytest_megatron/{name}" for name in IN_WHEEL])
    with step("twine check --strict"):
        run(UV, "tool", "run", "--from", TWINE, "twine", "check", "--strict", wheel, sdist)
    python = work / "venv" / "bin" / "python"
    with step("installs with the versions of the lock, without torch"):
        install(wheel, python)
    with step("runs without torch, project or home"):
        run_without_torch(python, wheel, work / "empty")
    with step("runs a test on two ranks with the torch that is here"):
        run_with_torch(python, work / "suite")
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        for path in (wheel, sdist):
            (keep / path.name).write_bytes(path.read_bytes())


@contextlib.contextmanager
def step(name: str) -> Iterator[None]:
    """Print a step and how long it took."""
    start = time.monotonic()
    yield
    print(f"package: {name} ({time.monotonic() - start:.1f} s)", flush=True)


def build(tree: Path, out: Path, *, umask: int) -> tuple[Path, Path]:
    """Return the wheel and the sdist of a tree."""
    before = os.umask(umask)
    try:
        run(UV, "build", "--no-config", "--quiet", "--wheel", "--sdist", "--out-dir", out, tree)
    finally:
        os.umask(before)
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, sdist


def require_equal(one: Path, other: Path) -> None:
    """Raise an error if two builds differ."""
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in (one, other)]
    if (one.name, digests[0]) != (other.name, digests[1]):
        raise PackageError(
            f"{one.name} {digests[0]} became {other.name} {digests[1]} when built from the sdist"
        )


def require_in(archive: Path, names: list[str]) -> None:
    """Raise an error if an archive lacks a file or a directory."""
    if archive.suffix == ".whl":
        found = zipfile.ZipFile(archive).namelist()
    else:
        with tarfile.open(archive) as opened:
            found = opened.getnames()
    parents = {str(parent) for name in found for parent in Path(name).parents}
    if missing := sorted(set(names) - set(found) - parents):
        raise PackageError(f"{archive.name} lacks {', '.join(missing)}")


def install(wheel: Path, python: Path) -> None:
    """Make an environment with the wheel and the lock's versions of what it requires."""
    run(UV, "venv", "--no-config", "--quiet", "--python", sys.executable, python.parents[1])
    locked = python.parents[1] / "requirements.txt"
    words = ("--frozen", "--quiet", "--no-dev", "--no-emit-project", "--output-file", locked)
    run(UV, "export", *words, cwd=ROOT)
    pip = (UV, "pip", "install", "--no-config", "--quiet", "--no-deps", "--python", python)
    run(*pip, "--require-hashes", "-r", locked)
    run(*pip, wheel)
    run(UV, "pip", "check", "--no-config", "--quiet", "--python", python)


def run_without_torch(python: Path, wheel: Path, directory: Path) -> None:
    """Run what needs no torch, and see what is said where it is needed."""
    directory.mkdir()
    (directory / "test_group.py").write_text("def test_group(process_group): pass\n")
    command = python.with_name("pytest-megatron")
    version = wheel.name.split("-")[1]
    expect(directory, rf"version {re.escape(version)}$", 0, command, "--version")
    expect(directory, r"has no torch \[torch-missing\]", 2, command, "doctor", "--no-collective")
    expect(directory, r"recipe\.schema\.json", 0, command, "lint", "--schema", "recipe")
    completion = {"_PYTEST_MEGATRON_COMPLETE": "bash_source"}
    expect(directory, r"complete .* pytest-megatron", 0, command, env=completion)
    pytest = (python.with_name("pytest"), "-p", "megatron", "-p", "no:cacheprovider")
    expect(directory, NEEDS_TORCH, 1, *pytest, "--ranks", "2")
    expect(directory, rf"plugins:.*megatron-{re.escape(version)}", 1, *pytest)


def run_with_torch(python: Path, directory: Path) -> None:
    """Run a distributed test with torch from the environment of this program."""
    world = python.parents[1] / "torch-world"
    world.mkdir()
    directory.mkdir()
    for path in sorted(of_torch("torch")):
        if not (world / path.name).exists():
            (world / path.name).symlink_to(path)
    (site,) = python.parents[1].glob("lib/python*/site-packages")
    (site / "torch-world.pth").write_text(f"{world}\n")
    (directory / "test_sum.py").write_text(TEST)
    words = ("-p", "megatron", "--ranks", "2", "--device", "cpu")
    expect(directory, r"=+ 1 passed in ", 0, python.with_name("pytest"), *words)


def of_torch(package: str, seen: frozenset[str] = frozenset()) -> set[Path]:
    """Return the files and directories in site-packages of a package and all that it requires."""
    if package in seen:
        return set()
    try:
        found = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError as error:
        if package == "torch":
            raise PackageError(f"{sys.executable} has no torch to try the wheel with") from error
        return set()  # another build of torch does without it
    tops = {Path(str(found.locate_file(file.parts[0]))) for file in found.files or ()}
    paths = {path for path in tops if path.name not in {"..", "__pycache__"}}
    for text in found.requires or ():
        needed = Requirement(text)
        if needed.marker is None or needed.marker.evaluate({"extra": ""}):
            paths |= of_torch(needed.name, seen | {package})
    return paths


def expect(
    directory: Path,
    pattern: str,
    code: int,
    *command: str | Path,
    env: dict[str, str] | None = None,
) -> None:
    """Run a command as a user would, with a home that cannot be written to, and judge it."""
    inherited = {
        name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ
    }
    done = subprocess.run(
        command,
        cwd=directory,
        env=inherited | {"HOME": "/proc", "COLUMNS": "200"} | (env or {}),
        capture_output=True,
        text=True,
        check=False,
    )
    text = done.stdout + done.stderr
    if done.returncode != code or not re.search(pattern, text, re.MULTILINE):
        shown = " ".join(map(str, command))
        raise PackageError(
            f"{shown}: exit code {done.returncode}, expected {code} and {pattern!r} in\n{text}"
        )
    if "Traceback (most recent call last)" in text:
        raise PackageError(f"{' '.join(map(str, command))} printed a traceback\n{text}")


def run(*command: str | Path, cwd: Path | None = None) -> None:
    """Run a step whose output matters only if it fails.

    Raises:
        PackageError: It failed.
    """
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        shown = " ".join(map(str, command))
        raise PackageError(f"{shown}: exit code {done.returncode}\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    sys.exit(main())

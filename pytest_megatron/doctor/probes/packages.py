"""Reads what is installed in an environment, from metadata; imports nothing."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable
from pathlib import Path

from packaging.utils import canonicalize_name

from pytest_megatron.doctor.facts import Package


def read_packages(paths: Iterable[Path]) -> dict[str, Package]:
    """Return the packages by name, each the first on the path."""
    found: dict[str, Package] = {}
    for path in dict.fromkeys(p.resolve() for p in paths):
        for distribution in importlib.metadata.distributions(path=[str(path)]):
            package = _package(distribution, path)
            if package is not None:
                found.setdefault(package.name, package)
    return found


def _package(distribution: importlib.metadata.Distribution, path: Path) -> Package | None:
    """Return the metadata of a distribution, None for what an installation left."""
    metadata = distribution.metadata
    name, version = metadata["Name"], metadata["Version"]
    if not name or not version:
        return None  # a directory that an installation left behind
    return Package(
        name=canonicalize_name(str(name)),
        version=str(version),
        location=path,
    )


def find_megatrons(paths: Iterable[Path]) -> tuple[Path, ...]:
    """Return the directories that `megatron.core` would be imported from, the first one wins."""
    found = dict.fromkeys(path.resolve() for path in paths)
    return tuple(path for path in found if (path / "megatron/core/__init__.py").is_file())

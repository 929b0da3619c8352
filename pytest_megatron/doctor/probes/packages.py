"""Reads what is installed in an environment, from metadata; imports nothing."""

from __future__ import annotations

import ast
import importlib.metadata
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

from packaging.utils import canonicalize_name

from pytest_megatron.base.files import JsonValue, parse_json
from pytest_megatron.doctor.facts import Package

_ASSIGNED = re.compile(r"^(\w+)\s*(?::[^=\n]+)?=\s*(.+)$", re.MULTILINE)


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
        editable=_editable(distribution.read_text("direct_url.json")),
    )


def read_direct_url(text: str | None) -> dict[str, JsonValue]:
    """Return the content of a `direct_url.json`; empty if there is none, or it is no mapping."""
    # Source: PyPA specifications, Recording the Direct URL Origin of installed distributions.
    try:
        value = parse_json(text or "null")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _editable(text: str | None) -> Path | None:
    """Return the checkout that a package is installed from, None where its files were copied."""
    found = read_direct_url(text)
    url, directory = found.get("url"), found.get("dir_info")
    is_editable = isinstance(directory, dict) and bool(directory.get("editable"))
    return Path(unquote(urlsplit(url).path)) if is_editable and isinstance(url, str) else None


def torch_version_file(directory: Path) -> Mapping[str, str | None]:
    """Return what `torch/version.py` assigns, without running it."""
    try:
        text = (directory / "version.py").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return {}
    found: dict[str, str | None] = {}
    for name, value in _ASSIGNED.findall(text):
        try:
            literal: object = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            continue
        if literal is None or isinstance(literal, str):
            found[name] = literal
    return found


def find_megatrons(paths: Iterable[Path], packages: Mapping[str, Package]) -> tuple[Path, ...]:
    """Return the directories that `megatron.core` would be imported from, the first one wins."""
    checkout = packages["megatron-core"].editable if "megatron-core" in packages else None
    places = [*paths, *([checkout] if checkout is not None else [])]
    found = dict.fromkeys(path.resolve() for path in places)
    return tuple(path for path in found if (path / "megatron/core/__init__.py").is_file())

"""The project's uv.lock against its requirements and the environment."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import cast

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from pytest_megatron.base.files import JsonValue
from pytest_megatron.base.project import find_pyproject
from pytest_megatron.base.text import listed
from pytest_megatron.doctor.facts import EnvironmentFacts, SystemView
from pytest_megatron.workload.checks.rules import RuleMatch

_MOST_SHOWN = 5
_Table = dict[str, JsonValue]


class _UnreadableError(Exception):
    """A file of the project is no TOML, or not what uv writes."""


def check_project(facts: EnvironmentFacts, places: SystemView) -> Iterator[RuleMatch]:
    """Yield what is wrong between the project, its lock and the environment."""
    active = places.env.get("VIRTUAL_ENV")
    if active and Path(active).resolve() != facts.python.prefix.resolve():
        yield RuleMatch("another-environment", active=active, prefix=facts.python.prefix)
    if facts.git_mend is not None:
        yield RuleMatch("git-owner", project=places.project, mend=facts.git_mend)
    pyproject = find_pyproject(places.project)
    if pyproject is None or not (pyproject.parent / "uv.lock").is_file():
        return
    lock = pyproject.parent / "uv.lock"
    try:
        packages = _rows(_read(lock).get("package"), lock)
        own = cast("_Table", _read(pyproject).get("project", {}))
        name = canonicalize_name(str(own.get("name", "")))
        root = next((row for row in packages if row.get("name") == name), None)
        if root is not None:
            yield from _stale(own, root)
        yield from _differences(packages, root, facts)
    except _UnreadableError as problem:
        yield RuleMatch("lock-unreadable", problem=problem)
    except (AttributeError, KeyError, TypeError) as problem:
        yield RuleMatch("lock-unreadable", problem=f"{lock}: not as uv writes it: {problem!r}")
    own_place = places.env.get("UV_PROJECT_ENVIRONMENT") or ".venv"
    is_own = facts.python.prefix.resolve() == (pyproject.parent / own_place).resolve()
    if not (is_own or _made_by_uv(facts.python.prefix)):
        yield RuleMatch("outside-uv", prefix=facts.python.prefix)


def _read(path: Path) -> _Table:
    try:
        return cast("_Table", tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as problem:
        raise _UnreadableError(f"{path}: cannot be read: {problem}") from problem


def _rows(value: JsonValue, lock: Path) -> list[_Table]:
    if not isinstance(value, list):
        raise _UnreadableError(f"{lock}: no packages in it")
    return [row for row in value if isinstance(row, dict)]


def _made_by_uv(prefix: Path) -> bool:
    try:
        lines = (prefix / "pyvenv.cfg").read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    return any(line.partition("=")[0].strip() == "uv" for line in lines)


def _stale(own: Mapping[str, JsonValue], root: _Table) -> Iterator[RuleMatch]:
    """Compare the requirements that a lock was made of with those of pyproject.toml."""
    written = {_key(text) for text in _requirements(own)}
    table = cast("_Table", root.get("metadata", {}))
    locked = {
        (canonicalize_name(str(row["name"])), _specifier(str(row.get("specifier", ""))))
        for row in cast("list[_Table]", table.get("requires-dist", []))
    }
    new = sorted(f"{name}{specifier}" for name, specifier in written - locked)
    gone = sorted(f"{name}{specifier}" for name, specifier in locked - written)
    texts = [f"{text} is new" for text in new] + [f"{text} is gone" for text in gone]
    if texts:
        yield RuleMatch("lock-stale", differences=listed(texts, _MOST_SHOWN))


def _requirements(own: Mapping[str, JsonValue]) -> Iterator[str]:
    yield from cast("list[str]", own.get("dependencies", []))
    for texts in cast("dict[str, list[str]]", own.get("optional-dependencies", {})).values():
        yield from texts


def _key(text: str) -> tuple[str, str]:
    try:
        requirement = Requirement(text)
    except InvalidRequirement as problem:
        raise _UnreadableError(f"pyproject.toml: {text!r} is no requirement") from problem
    return canonicalize_name(requirement.name), _specifier(str(requirement.specifier))


def _specifier(text: str) -> str:
    """Return a specifier in an order of its own; uv and people sort otherwise."""
    return str(SpecifierSet(text))


def _differences(
    packages: list[_Table], root: _Table | None, facts: EnvironmentFacts
) -> Iterator[RuleMatch]:
    """Compare installed versions with locked ones; one package may be locked in several."""
    locked: dict[str, set[str]] = {}
    for row in packages:
        if "version" in row:
            locked.setdefault(str(row["name"]), set()).add(str(row["version"]))
    texts = []
    for name, versions in sorted(locked.items()):
        package = facts.packages.get(name)
        if package is None or package.editable is not None:
            continue
        if package.version not in versions and package.version.partition("+")[0] not in versions:
            texts.append(f"{name} {package.version} (locked {' or '.join(sorted(versions))})")
    if texts:
        number = f"{len(texts)} package{'s are' if len(texts) > 1 else ' is'}"
        yield RuleMatch("lock-differs", count=number, differences=listed(texts, _MOST_SHOWN))
    if root is None:
        return
    direct = cast("list[_Table]", root.get("dependencies", []))
    names = [str(row["name"]) for row in direct if "marker" not in row]
    if lost := sorted(name for name in names if name not in facts.packages):
        yield RuleMatch("lock-missing", packages=listed(lost, _MOST_SHOWN))

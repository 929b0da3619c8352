"""The project that a directory belongs to: its settings, and its git.

The settings are `[tool.pytest-megatron]` in the nearest `pyproject.toml`. Reads and checks the
words that a project adds to the vocabulary; a subtable, such as `[tool.pytest-megatron.ci]`,
belongs to the package that it is named after and is handed over as it is. Knows no pytest option.

Quarantine lets an item that is known to fail run without failing the run. Marks, rows of recipes
and the settings have the same two keys for it: a reason and a day.
"""

from __future__ import annotations

import datetime as dt
import functools
import os
import re
import subprocess
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from pytest_megatron.base.files import JsonValue, read_text
from pytest_megatron.base.text import one_of
from pytest_megatron.errors import REMOVED, ConfigError

_KEYS = ("reason", "until")
_MOST_DAYS = 366
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}").fullmatch


class QuarantineError(Exception):
    """A quarantine lacks a key, or has a wrong one; the text has the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantine:
    """The reason that an item may fail, and the last day of that.

    Attributes:
        until: The last day on which it holds, UTC.
    """

    reason: str
    until: dt.date

    def holds_on(self, day: dt.date) -> bool:
        """Return whether a failure on that day does not count."""
        return day <= self.until


def parse_quarantine(given: object) -> Quarantine:
    """Read `{reason: ..., until: 2026-12-31}`, as marks, recipe rows and settings have it.

    Raises:
        QuarantineError: A key is missing, unknown or of the wrong kind, or the day is more than a
            year ahead.
    """
    if not isinstance(given, Mapping):
        raise QuarantineError(
            f'found {given!r}, expected reason and until: {{reason: "...", until: "2026-12-31"}}'
        )
    for key in given:
        if key not in _KEYS:
            raise QuarantineError(f"unknown key {key!r}, expected {one_of(key, _KEYS)}")
    reason = given.get("reason")
    if not isinstance(reason, str) or not reason.strip():
        raise QuarantineError(
            f"reason: {_found(given, 'reason')}, expected why it may fail; "
            f"name the issue that ends it"
        )
    until = _date(given)
    if until > today() + dt.timedelta(days=_MOST_DAYS):
        raise QuarantineError(
            f"until: found {until}, expected a day within a year; a quarantine without an end is "
            f"forgotten"
        )
    return Quarantine(reason=" ".join(reason.split()), until=until)


def today() -> dt.date:
    """Return the day, UTC, so that a run's machines agree on it."""
    return dt.datetime.now(dt.UTC).date()


def _date(given: Mapping[object, object]) -> dt.date:
    """Return the last day that a quarantine holds."""
    until = given.get("until")
    if isinstance(until, dt.date):
        return until
    if isinstance(until, str) and _DATE(until):
        try:
            return dt.date.fromisoformat(until)
        except ValueError:
            pass  # the 31st of February
    raise QuarantineError(
        f"until: {_found(given, 'until')}, expected the last day that it holds, "
        f"such as 2026-12-31; a quarantine without an end is forgotten"
    )


def _found(given: Mapping[object, object], key: str) -> str:
    return f"found {given[key]!r}" if key in given else "is missing"


_WORDS = {  # key of a list of words -> field
    "environments": "environments",
    "kept-variables": "kept_variables",
    "platforms": "platforms",
    "scopes": "scopes",
    "secret-names": "secret_names",
    "signatures": "signature_files",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectConfig:
    """The settings of a project.

    Attributes:
        file: The `pyproject.toml` that was read, None where there is none.
        scopes: Words beside the built-in ones; `platforms` and `environments` alike.
        signature_files: Files with signatures of the project's own, for triage.
        secret_names: Patterns of names of variables and options that hold secrets, `MY_*`.
        kept_variables: Patterns of names of variables that a run keeps, to be set again when it
            is reproduced.
        tables: The subtables of `[tool.pytest-megatron]` by name, unchecked.
    """

    file: Path | None = None
    scopes: tuple[str, ...] = ()
    platforms: tuple[str, ...] = ()
    environments: tuple[str, ...] = ()
    signature_files: tuple[Path, ...] = ()
    secret_names: tuple[str, ...] = ()
    kept_variables: tuple[str, ...] = ()
    tables: Mapping[str, JsonValue] = field(default_factory=dict)


def find_pyproject(start: Path) -> Path | None:
    """Return the `pyproject.toml` in `start` or the nearest directory above it."""
    for directory in (start, *start.absolute().parents):
        if (directory / "pyproject.toml").is_file():
            return directory / "pyproject.toml"
    return None


def load_config(start: Path) -> ProjectConfig:
    """Read the settings of the project that the directory `start` is in.

    Raises:
        ConfigError: The file is not TOML, or a key is unknown or of the wrong type.
    """
    path = find_pyproject(start)
    if path is None:
        return ProjectConfig()
    state = path.stat()
    return _read_config(path, state.st_mtime_ns, state.st_size)


@functools.lru_cache(maxsize=8)
def _read_config(path: Path, _mtime_ns: int, _size: int) -> ProjectConfig:
    """Read a file; once for each state that it is in, since hundreds of workloads ask."""
    try:
        data = tomllib.loads(read_text(path))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as problem:
        raise ConfigError(str(path), f"cannot be read: {problem}") from problem
    table = cast("JsonValue", data.get("tool", {}).get("pytest-megatron", {}))
    where = f"{path}: [tool.pytest-megatron]"
    if not isinstance(table, dict):
        raise ConfigError(where, f"found {table!r}, expected a table")
    tables = {key: value for key, value in table.items() if isinstance(value, dict)}
    for key in sorted(table.keys() & REMOVED.keys()):
        raise ConfigError(where, f"{key} {REMOVED[key]}")
    for key in table.keys() - tables.keys() - _WORDS.keys():
        raise ConfigError(where, f"unknown key {key!r}, expected {one_of(key, _WORDS)}")
    words = {field: _words(table.get(key, []), f"{where} {key}") for key, field in _WORDS.items()}
    files = tuple(path.parent / name for name in words.pop("signature_files"))
    return ProjectConfig(
        file=path,
        tables=tables,
        signature_files=files,
        **words,
    )


def _words(value: JsonValue, where: str) -> tuple[str, ...]:
    """Return a setting that is a list of words."""
    if not isinstance(value, list) or not all(isinstance(word, str) and word for word in value):
        raise ConfigError(where, f"found {value!r}, expected a list of non-empty strings")
    return tuple(str(word) for word in value)


# Source: git setup.c, die_upon_dubious_ownership, from 2.35.2 on; a command is not translated.
SHORT_COMMIT = 12  # characters of a commit that is shown
_REFUSAL = re.compile(r"^\s*(git config --global --add safe\.directory .+)$", re.MULTILINE)


def fix_of_owner(message: str) -> str | None:
    """Return the command that lets git read a checkout that it refuses by its owner.

    None for any other message of git.
    """
    match = _REFUSAL.search(message)
    return match[1] if match else None


def ask_git_for_owner(root: Path) -> str | None:
    """Return the command that lets git read a checkout, None where it reads it or there is none."""
    try:
        done = run_git(root, "rev-parse", "--git-dir")
    except OSError:
        return None
    return fix_of_owner(os.fsdecode(done.stderr))


def ask_git(root: Path, *arguments: str) -> str | None:
    """Return the output of git in the directory `root`, without white space around it.

    None where it fails, where there is no git, or outside of a checkout.
    """
    output = read_git(root, *arguments)
    return None if output is None else os.fsdecode(output).strip()


def read_git(root: Path, *arguments: str, fine: Collection[int] = (0,)) -> bytes | None:
    """Return the output of git in the directory `root`, byte for byte.

    None where it ends with an exit code that is not `fine`, or where there is no git.
    """
    try:
        done = run_git(root, *arguments)
    except OSError:
        return None
    return done.stdout if done.returncode in fine else None


def run_git(
    root: Path, *arguments: str, given: bytes = b"", env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run git in the directory `root` to its end, with `given` as its input.

    Raises:
        OSError: It cannot be started.
    """
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, input=given, env=env, capture_output=True, check=False)

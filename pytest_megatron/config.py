"""The project's settings: `[tool.pytest-megatron]` in the nearest `pyproject.toml`.

Reads and checks the words that a project adds to the vocabulary; a subtable, such as
`[tool.pytest-megatron.ci]`, belongs to the package that it is named after and is handed over as it
is. Knows no pytest option.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from pytest_megatron.errors import ConfigError
from pytest_megatron.files import JsonValue

WORD_KEYS = ("environments", "platforms", "scopes")
SIGNATURES_KEY = "signatures"
SECRETS_KEY = "secret_names"
KEPT_KEY = "kept_variables"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectConfig:
    """What a project says about itself.

    Attributes:
        file: The `pyproject.toml` that was read, None where there is none.
        scopes: Words beside the built-in ones; `platforms` and `environments` alike.
        signature_files: Of signatures of the project's own, for triage.
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
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as problem:
        raise ConfigError(str(path), f"cannot be read: {problem}") from problem
    table = cast("JsonValue", data.get("tool", {}).get("pytest-megatron", {}))
    where = f"{path}: [tool.pytest-megatron]"
    if not isinstance(table, dict):
        raise ConfigError(where, f"found {table!r}, expected a table")
    tables = {key: value for key, value in table.items() if isinstance(value, dict)}
    known = tuple(sorted((*WORD_KEYS, SIGNATURES_KEY, SECRETS_KEY, KEPT_KEY)))
    for key in table.keys() - tables.keys() - set(known):
        close = difflib.get_close_matches(key, known, 1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(where, f"unknown key {key!r}, expected one of {', '.join(known)}{hint}")
    words = {
        key: _words(table.get(key, []), f"{where} {key}")
        for key in (*WORD_KEYS, SECRETS_KEY, KEPT_KEY)
    }
    files = _words(table.get(SIGNATURES_KEY, []), f"{where} {SIGNATURES_KEY}")
    own = tuple(path.parent / name for name in files)
    return ProjectConfig(file=path, tables=tables, signature_files=own, **words)


def _words(value: JsonValue, where: str) -> tuple[str, ...]:
    """Return a setting that is a list of words."""
    if not isinstance(value, list) or not all(isinstance(word, str) and word for word in value):
        raise ConfigError(where, f"found {value!r}, expected a list of non-empty strings")
    return tuple(str(word) for word in value)

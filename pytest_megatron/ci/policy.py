"""The policy that the project's settings have CI compare under, as pytest would find it."""

from __future__ import annotations

import argparse
import configparser
import shlex
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import cast

from pytest_megatron.base.files import JsonValue, read_text
from pytest_megatron.errors import ConfigError
from pytest_megatron.golden.policy import Base, ComparisonPolicy, policy_named

_INI_KEY = "megatron_golden_policy"
# Files of settings in the order in which pytest tries them, with the table each keeps them in.
_SETTINGS_FILES = (
    ("pytest.toml", ("pytest",)),
    (".pytest.toml", ("pytest",)),
    ("pytest.ini", ("pytest",)),
    (".pytest.ini", ("pytest",)),
    ("pyproject.toml", ("tool", "pytest")),
    ("tox.ini", ("pytest",)),
    ("setup.cfg", ("tool:pytest",)),
)
_TABLE_IS_OPTIONAL = ("pytest.toml", ".pytest.toml", "pytest.ini", ".pytest.ini")


def planned_policy(root: Path, arguments: Sequence[str]) -> ComparisonPolicy:
    """Return the policy of a project's settings and of the arguments that CI adds.

    Variables of the environment do not count: a job under another one is not as planned.

    Args:
        root: The project's, where pytest is started.
        arguments: Of pytest, such as `--golden-policy megatron`; they win over `addopts`.

    Raises:
        ConfigError: The file of pytest's settings cannot be read.
        GoldenError: The policy is unknown, or its file is wrong.
    """
    file, settings = _read_settings(root)
    addopts = settings.get("addopts", "")
    words = shlex.split(addopts) if isinstance(addopts, str) else [str(w) for w in _list(addopts)]
    typed, overrides = _parse([*words, *arguments])
    named = typed or overrides.get(_INI_KEY) or settings.get(_INI_KEY) or Base.STRICT.value
    return policy_named(str(named), where=str(file or "--golden-policy"), root=root)


def _list(value: JsonValue) -> Iterable[JsonValue]:
    return value if isinstance(value, list) else ()


def _parse(words: Sequence[str]) -> tuple[str | None, dict[str, str]]:
    """Return the policy and the overrides of the ini file in arguments of pytest."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--golden-policy")
    parser.add_argument("-o", "--override-ini", action="append", default=[])
    try:
        found, _ = parser.parse_known_args(words)
    except argparse.ArgumentError:
        return None, {}  # pytest refuses it
    pairs = (text.partition("=") for text in found.override_ini)
    return found.golden_policy, {key: value for key, _, value in pairs}


def _read_settings(root: Path) -> tuple[Path | None, Mapping[str, JsonValue]]:
    """Return pytest's file of settings at or above a directory, and its content."""
    for directory in (root.absolute(), *root.absolute().parents):
        for name, table in _SETTINGS_FILES:
            path = directory / name
            if path.is_file() and (found := _table(path, table)) is not None:
                return path, found
    return None, {}


def _table(path: Path, keys: tuple[str, ...]) -> Mapping[str, JsonValue] | None:
    try:
        text = read_text(path)
        data = tomllib.loads(text) if path.suffix == ".toml" else _parse_ini(text)
    except (OSError, ValueError, configparser.Error) as problem:
        raise ConfigError(str(path), f"cannot be read: {problem}") from problem
    found: JsonValue = cast("JsonValue", data)
    for key in keys:
        found = found.get(key) if isinstance(found, dict) else None
    if not isinstance(found, dict):
        return {} if path.name in _TABLE_IS_OPTIONAL else None
    options = found.get("ini_options")  # pyproject.toml before pytest 9
    return options if isinstance(options, dict) else found


def _parse_ini(text: str) -> dict[str, dict[str, str]]:
    parser = configparser.RawConfigParser(strict=False, default_section="")
    parser.optionxform = str  # type: ignore[method-assign,assignment] # names keep their case
    parser.read_string(text)
    return {name: dict(parser[name]) for name in parser.sections()}

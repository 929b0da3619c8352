"""Reads the file of `--executor-config`; what is wrong in it is said with file and line."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from pytest_megatron.base.files import JsonValue
from pytest_megatron.base.yaml import YamlDocument, YamlPath, read_yaml
from pytest_megatron.engines.config import (
    GPUS_OF_RECIPE,
    ContainerConfig,
    DockerConfig,
    ExecutorConfig,
    PlaceConfig,
    SlurmConfig,
    UvSyncConfig,
)
from pytest_megatron.errors import ConfigError
from pytest_megatron.gpu.host import CPU_PLATFORM
from pytest_megatron.recipe.schema import dotted, shown
from pytest_megatron.recipe.vocabulary import nearest

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

GROUP = "pytest_megatron.engines"
FORMAT_VERSION = 1
_VERSION_KEY = "format_version"
_SECTIONS: Mapping[str, type[SlurmConfig | DockerConfig]] = {
    "docker": DockerConfig,
    "slurm": SlurmConfig,
}
_SECTION = TypeVar("_SECTION", SlurmConfig, DockerConfig)
_LAST_PORT = 65_535
# Values that are a text however they look in YAML: `mem: 0`, `time: 1:00:00`, `env: {X: 0x10}`.
_WRITTEN = frozenset(("account", "mem", "reservation", "shm_size", "time", "user"))
_VARIABLES = frozenset(("env", "job_env"))

# Flags that the engine gives by itself, and those that a key of the file stands for.
_OWN_FLAGS = frozenset(
    (
        *("array", "chdir", "comment", "error", "job-name", "no-requeue", "nodes", "ntasks"),
        *("ntasks-per-node", "output", "parsable", "requeue", "test-only", "wait", "wrap"),
    )
)
_KEY_FLAGS: Mapping[str, str] = {
    **{
        name.replace("_", "-"): name
        for name in (
            *("account", "constraint", "cpus_per_task", "exclude", "exclusive", "gpus_per_node"),
            *("gres", "mem", "mpi", "nodelist", "partition", "qos", "reservation", "segment"),
            "time",
        )
    },
    "container-env": "container.env",
    "container-image": "container.image",
    "container-mount-home": "container.mounts_home",
    "container-mounts": "container.mounts",
    "container-workdir": "container.workdir",
    "no-container-mount-home": "container.mounts_home",
}
_EXPECTED = {
    "bool_type": "true or false",
    "dataclass_type": "a mapping",
    "dict_type": "a mapping",
    "float_type": "a number",
    "int_type": "a whole number",
    "list_type": "a list",
    "string_too_short": "a text that is not empty",
    "string_type": "a text",
    "tuple_type": "a list",
}
_PATTERNS = {
    "sbatch_flags": "a long flag, --name or --name=value",
    "srun_flags": "a long flag, --name or --name=value",
    "mounts": "SOURCE:TARGET or SOURCE:TARGET:ro, both absolute, without commas and blanks",
    "ports": "FIRST-LAST, such as 20000-29999",
    "shm_size": "a size, such as 16g",
    "time": "a time of Slurm's: minutes, hours:minutes:seconds or days-hours",
    "venv": "an absolute path, in a directory of its own",
    "env": "the name of a variable",
    "job_env": "the name of a variable",
}


def read_executor_config(path: Path) -> ExecutorConfig:
    """Read a file of `--executor-config`.

    Raises:
        ConfigError: With file and line: it is not there or not YAML, has a key twice or one that
            nobody reads, or a value is not what its key takes.
    """
    document = read_yaml(path, error=ConfigError)
    for twice in document.duplicates:
        raise ConfigError(
            f"{path}:{twice.second_line}", f"the key {twice.key!r} is there twice; keep one"
        )
    value = document.value
    version = value.get(_VERSION_KEY)
    if version != FORMAT_VERSION or isinstance(version, bool):
        found = f"found {version!r}" if _VERSION_KEY in value else "is missing"
        raise ConfigError(
            document.where((_VERSION_KEY,)), f"{_VERSION_KEY}: {found}, expected {FORMAT_VERSION}"
        )
    foreign = _foreign_engines(value)
    known = sorted({_VERSION_KEY, *_SECTIONS, *foreign})
    for key in value:
        if key not in known:
            raise ConfigError(
                document.where((key,)),
                f"{key}: unknown key, expected one of {', '.join(known)}{nearest(key, known)}",
            )
    slurm = _section(document, "slurm", SlurmConfig)
    if slurm is not None:
        _check_slurm(document, slurm)
    return ExecutorConfig(
        slurm=slurm,
        docker=_section(document, "docker", DockerConfig),
        others={name: value[name] for name in foreign},
    )


def read_slurm_config(path: Path | None, platforms: Collection[str] = ()) -> SlurmConfig:
    """Return the section `slurm` of a file; what is not said, and all without a file, is default.

    Args:
        path: What `--executor-config` names, or None.
        platforms: The words that the section may have settings for; empty to take any.

    Raises:
        ConfigError: As from `read_executor_config`; or a platform is none.
    """
    found = None if path is None else read_executor_config(path).slurm
    for name in (found or SlurmConfig()).platforms if platforms else ():
        if name not in platforms:
            raise ConfigError(
                f"{path}: slurm.platforms",
                f"unknown platform {name!r}, expected one of {', '.join(sorted(platforms))}"
                f"{nearest(name, platforms)}",
            )
    return found or SlurmConfig()


def read_docker_config(path: Path | None) -> DockerConfig:
    """Return the section `docker` of a file.

    Raises:
        ConfigError: As from `read_executor_config`; or there is no file, or no such section:
            without an image there is no container.
    """
    if path is None:
        raise ConfigError(
            "--executor-config",
            "is not given, expected a file with `docker: {image: ...}` in it; "
            "docker needs to know which image",
        )
    found = read_executor_config(path).docker
    if found is None:
        raise ConfigError(str(path), "has no section docker, expected docker: {image: ...}; add it")
    return found


def json_schema() -> dict[str, JsonValue]:
    """Return the JSON schema of the file."""
    parts: dict[str, JsonValue] = {}
    properties: dict[str, JsonValue] = {_VERSION_KEY: {"const": FORMAT_VERSION}}
    for name, kind in _SECTIONS.items():
        schema = cast(
            "dict[str, JsonValue]",
            TypeAdapter(kind).json_schema(ref_template="#/$defs/{model}"),
        )
        parts |= cast("dict[str, JsonValue]", schema.pop("$defs", {}))
        parts[kind.__name__] = schema
        properties[name] = {"$ref": f"#/$defs/{kind.__name__}"}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "pytest-megatron executor configuration",
        "description": "Further keys are names of engines of other packages.",
        "type": "object",
        "properties": properties,
        "required": [_VERSION_KEY],
        "$defs": parts,
    }


def _foreign_engines(value: Mapping[str, JsonValue]) -> list[str]:
    """Return the sections of a file that an installed package has an engine for."""
    unknown = [key for key in value if key not in (_VERSION_KEY, *_SECTIONS)]
    if not unknown:
        return []
    names = {entry.name for entry in importlib.metadata.entry_points(group=GROUP)}
    return [key for key in unknown if key in names - {"local"}]


def _section(document: YamlDocument, name: str, kind: type[_SECTION]) -> _SECTION | None:
    """Return a section as its type; None where it is not there."""
    if name not in document.value:
        return None
    value = _as_written(document, (name,), document.value[name])
    try:
        # As JSON: a list is a tuple there, and a word one of an Enum.
        return TypeAdapter(kind).validate_json(json.dumps(value))
    except ValidationError as error:
        path, message = _problem(error.errors(include_url=False)[0], name, kind)
        raise ConfigError(document.where(path), message) from None


def _as_written(document: YamlDocument, path: YamlPath, value: JsonValue) -> JsonValue:
    """Return a value with what must be a text as its characters in the file."""
    if isinstance(value, dict):
        return {key: _as_written(document, (*path, key), one) for key, one in value.items()}
    if isinstance(value, list):
        return [_as_written(document, (*path, i), one) for i, one in enumerate(value)]
    is_text = path[-1] in _WRITTEN or (len(path) > 1 and path[-2] in _VARIABLES)
    if is_text and isinstance(value, bool | int | float):
        return document.text_of(path)
    return value


def _problem(
    error: ErrorDetails, section: str, kind: type[SlurmConfig | DockerConfig]
) -> tuple[YamlPath, str]:
    """Put one of pydantic's errors into our words, with its place."""
    loc = error["loc"]
    is_name = loc[-1:] == ("[key]",)
    path: YamlPath = (section, *(loc[:-1] if is_name else loc))
    where = dotted(path)
    if error["type"] == "missing":
        return path, f"{where}: is missing; add it"
    if error["type"] == "unexpected_keyword_argument":
        keys = sorted(_keys_at(kind, loc[:-1]))
        hint = nearest(str(path[-1]), keys)
        return path, f"{where}: unknown key, expected one of {', '.join(keys)}{hint}"
    return path, f"{where}: found {shown(error['input'])}, expected {_expected(error, path)}"


def _expected(error: ErrorDetails, path: YamlPath) -> str:
    """Return what pydantic expected, in our words."""
    match error["type"]:
        case "string_pattern_mismatch":
            return _PATTERNS[next(str(step) for step in reversed(path) if step in _PATTERNS)]
        case "enum" | "literal_error":
            return str(error["ctx"]["expected"])
        case "greater_than_equal":
            return f"a number from {error['ctx']['ge']} up"
        case "greater_than":
            return f"a number above {error['ctx']['gt']:g}"
        case rule:
            return _EXPECTED.get(rule, error["msg"])


def _keys_at(kind: type[SlurmConfig | DockerConfig], loc: tuple[int | str, ...]) -> list[str]:
    """Return the keys that a mapping in a section can have."""
    found: type[DataclassInstance] = kind
    if loc[-1:] == ("container",):
        found = ContainerConfig
    elif loc[-1:] == ("uv_sync",):
        found = UvSyncConfig
    elif loc[:1] == ("platforms",):
        found = PlaceConfig
    return [key.name for key in dataclasses.fields(found)]


def _check_slurm(document: YamlDocument, config: SlurmConfig) -> None:
    """Refuse what the schema cannot see.

    Raises:
        ConfigError: A port is none, or a flag is one that the engine gives.
    """
    ports = config.port_range
    if not 0 < ports.start < ports.stop <= _LAST_PORT + 1:
        raise ConfigError(
            document.where(("slurm", "ports")),
            f"slurm.ports: found {config.ports!r}, expected FIRST-LAST within 1-{_LAST_PORT}, "
            f"the lower one first",
        )
    _check_flags(document, ("slurm",), config)
    for name, own in config.platforms.items():
        _check_flags(document, ("slurm", "platforms", name), own)
    on_cpu = config.platforms.get(CPU_PLATFORM)
    if on_cpu is not None and GPUS_OF_RECIPE in (on_cpu.gres or ""):
        raise ConfigError(
            document.where(("slurm", "platforms", CPU_PLATFORM, "gres")),
            f"slurm.platforms.{CPU_PLATFORM}.gres: found {on_cpu.gres!r}, and a recipe has no GPUs "
            f"on this platform; write a number in place of {GPUS_OF_RECIPE}, or remove it",
        )


def _check_flags(document: YamlDocument, path: YamlPath, place: PlaceConfig) -> None:
    for index, word in enumerate(place.sbatch_flags):
        _check_flag(document, (*path, "sbatch_flags", index), word)
    for index, word in enumerate(place.srun_flags):
        _check_flag(document, (*path, "srun_flags", index), word)


def _check_flag(document: YamlDocument, path: YamlPath, word: str) -> None:
    """Refuse a flag that would be given twice."""
    name = word.removeprefix("--").partition("=")[0]
    where, place = document.where(path), dotted(path)
    if name in _OWN_FLAGS:
        raise ConfigError(where, f"{place}: {word!r} is what the engine sets itself; remove it")
    if name in _KEY_FLAGS:
        raise ConfigError(
            where,
            f"{place}: {word!r} has a key of its own, {_KEY_FLAGS[name]}; write it there",
        )

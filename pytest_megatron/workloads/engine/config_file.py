"""Reads the file of `--executor-config`; what is wrong in it is said with file and line."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Collection
from pathlib import Path

from pytest_megatron.base import schema
from pytest_megatron.base.files import JsonValue
from pytest_megatron.base.text import one_of
from pytest_megatron.base.yaml import YamlDocument, YamlPath, read_yaml
from pytest_megatron.errors import ConfigError
from pytest_megatron.workloads.engine.api import GROUP
from pytest_megatron.workloads.engine.config import DockerConfig, ExecutorConfig, SlurmConfig

# Values that are a text however they look in YAML: `mem: 0`, `time: 1:00:00`, `env: {X: 0x10}`.
_WRITTEN = frozenset(("account", "mem", "reservation", "shm_size", "time", "user"))
_VARIABLES = frozenset(("env", "job_env"))
# Keys of earlier versions, by section: what to do instead.
_REMOVED = {
    ("slurm", "max_array"): "was removed, as jobs are no arrays any more; drop it",
    ("slurm", "remember_nodes"): "was removed; drop it, exclude has the nodes to keep away from",
    ("slurm", "shared_paths"): "was removed, as paths are not checked any more; drop it",
}


def read_executor_config(path: Path) -> ExecutorConfig:
    """Read a file of `--executor-config`.

    Raises:
        ConfigError: With file and line: it is not there or not YAML, has a key twice or one that
            nobody reads, or a value is not what its key takes.
    """
    document = read_yaml(path, error=ConfigError)
    schema.refuse_duplicates(document, ConfigError)
    for (section, key), text in _REMOVED.items():
        found = document.value.get(section)
        if isinstance(found, dict) and key in found:
            raise ConfigError(f"{document.where((section, key))}: {section}.{key}", text)
    engines = {entry.name for entry in importlib.metadata.entry_points(group=GROUP)}
    foreign = engines - {"docker", "local", "slurm"}
    value = {
        key: _as_written(document, (key,), one)
        for key, one in document.value.items()
        if key not in foreign
    }
    return schema.read(ExecutorConfig, document, ConfigError, value)


def read_slurm_config(path: Path | None, platforms: Collection[str] = ()) -> SlurmConfig:
    """Return the section `slurm` of a file; what is not said, and all without a file, is default.

    Args:
        path: What `--executor-config` names, or None.
        platforms: The words that the section may have settings for; empty to take any.

    Raises:
        ConfigError: The file is refused, see `read_executor_config`; or a platform is none.
    """
    found = None if path is None else read_executor_config(path).slurm
    for name in (found or SlurmConfig()).platforms if platforms else ():
        if name not in platforms:
            raise ConfigError(
                f"{path}: slurm.platforms",
                f"unknown platform {name!r}, expected {one_of(name, platforms)}",
            )
    return found or SlurmConfig()


def read_docker_config(path: Path | None) -> DockerConfig:
    """Return the section `docker` of a file.

    Raises:
        ConfigError: The file is refused, see `read_executor_config`; or there is no file, or no
            such section: without an image there is no container.
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
    found = schema.json_schema(ExecutorConfig, "pytest-megatron executor configuration")
    del found["additionalProperties"]
    return found


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

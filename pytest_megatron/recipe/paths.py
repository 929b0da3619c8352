"""Paths of the files of a row and its test case, below the root of a project."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from pytest_megatron.base.files import JsonValue
from pytest_megatron.recipe.case import HARNESS_VARIABLES, MODEL_ARGS
from pytest_megatron.recipe.model import Workload

CASES = Path("tests/functional_tests/test_cases")
CASE_NAME = "model_config.yaml"
GOLDENS = Path("golden_values")
GOLDEN_PREFIX = "golden_values"
NO_OTHER_NAMES: Mapping[str, str] = MappingProxyType({})


def case_path(root: Path, workload: Workload) -> Path:
    """Return the `model_config.yaml` of a workload."""
    return root / CASES / workload.model / workload.test_case / CASE_NAME


def is_missing_program(root: Path, program: str) -> bool:
    """Return whether a `training_script_path` names a Python file of the project that is not there.

    A command (`nemo llm pretrain`) is looked for by the shell, an absolute path may be one of the
    machines that train, and values of variables and placeholders are not known.
    """
    file = (shlex.split(program) or [""])[0]
    is_ours = file.endswith(".py") and not Path(file).is_absolute() and not set(file) & set("{}$")
    return is_ours and not (root / file).is_file()


def golden_name(environment: str, platform: str) -> str:
    """Return the file name of a golden; the oldest ones name no platform."""
    return "_".join(part for part in (GOLDEN_PREFIX, environment, platform) if part) + ".json"


def golden_paths(
    root: Path, workload: Workload, other_names: Mapping[str, str] = NO_OTHER_NAMES
) -> tuple[Path, ...]:
    """Return where a workload's golden may be, the place that counts most first.

    That is our place, then Megatron-LM's beside the case, each with the platform's own name, then
    the two places with each of its other names. The first one is where a new golden belongs.

    Args:
        root: The project's.
        workload: Whose golden.
        other_names: Name in a golden's file name to the platform that it stands for.
    """
    return tuple(_places(root, workload, _names_of(workload.platform, other_names)))


def _names_of(platform: str, other_names: Mapping[str, str]) -> Iterator[str]:
    yield platform
    for name, meant in other_names.items():
        if meant == platform and name != platform:
            yield name


def _places(root: Path, workload: Workload, names: Iterator[str]) -> Iterator[Path]:
    for name in names:
        below = Path(workload.model, workload.test_case, golden_name(workload.environment, name))
        yield root / GOLDENS / below
        yield root / CASES / below


_CASE_KEYS = ("BEFORE_SCRIPT", "ENV_VARS", "MODE", "MODEL_ENV_VARS", "TEST_TYPE")
# Variables of the harness that change what is trained, or what of it counts.
_TRAINED_VARIABLES = ("NVTE_ALLOW_NONDETERMINISTIC_ALGO",)
_LENGTH = 16  # hexadecimal digits


def fingerprint(workload: Workload, case: Mapping[str, JsonValue] | None) -> str:
    """Return 16 hexadecimal digits: the `config_hash` of a golden.

    Args:
        workload: The row.
        case: The content of its `model_config.yaml`; None for a row that has none.
    """
    env = (case or {}).get("ENV_VARS")
    ignored = set(HARNESS_VARIABLES) - set(_TRAINED_VARIABLES)
    known: dict[str, JsonValue] = {
        key: value
        for key, value in (case or {}).items()
        if key in _CASE_KEYS or MODEL_ARGS(key) is not None
    }
    if isinstance(env, dict):
        known["ENV_VARS"] = {name: value for name, value in env.items() if name not in ignored}
    row: dict[str, JsonValue] = {
        "checkpoint_load_path": workload.checkpoint_load_path,
        "data_path": workload.data_path,
        "gpus": workload.gpus,
        "nodes": workload.nodes,
        "script": workload.script,
        "training_script_path": workload.training_script_path,
    }
    text = json.dumps([known, row], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_LENGTH]

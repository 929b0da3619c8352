"""One short text for all that decides what a row trains, so that a golden can name it. Pure.

Two rows with the same fingerprint run the same program with the same arguments; what is only
compared, or says when and how often to run, does not count, nor do comments and order.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from pytest_megatron.files import JsonValue
from pytest_megatron.recipe.cases import HARNESS_VARIABLES, MODEL_ARGS
from pytest_megatron.recipe.model import Workload

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

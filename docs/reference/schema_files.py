"""Writes `pytest_megatron/schemas`, the JSON Schemas that the wheel has, from the code.

    python3 dev.py generate

A test compares the files with the code. That of goldens is written by hand: their reader takes more
than the schema allows.
"""

# ruff: noqa: INP001 - a script, no package

from __future__ import annotations

import json

from pytest_megatron.ci.table import table_json_schema
from pytest_megatron.engines import config
from pytest_megatron.runs import record
from pytest_megatron.workloads.commands.recipes import schema_path
from pytest_megatron.workloads.golden.policy import policy_json_schema
from pytest_megatron.workloads.recipe import case
from pytest_megatron.workloads.recipe import load as recipe

MAKERS = {
    "case": case.json_schema,
    "ci": table_json_schema,
    "executor-config": config.json_schema,
    "policy": policy_json_schema,
    "recipe": recipe.json_schema,
    "run": record.json_schema,
}


def text_of(name: str) -> str:
    """Return the text of a schema's file."""
    return json.dumps(MAKERS[name](), indent=2) + "\n"


def main() -> None:
    """Write all of them."""
    for name in MAKERS:
        schema_path(name).write_text(text_of(name), encoding="utf-8")


if __name__ == "__main__":
    main()

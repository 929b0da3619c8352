"""Single rows, as a recipe gives them."""

from __future__ import annotations

from pathlib import Path

from pytest_megatron.base.files import JsonValue
from pytest_megatron.workloads.recipe.model import Row, Workload, parse_row


def row_of(**spec: JsonValue) -> Workload:
    """Return the row of line 7 in recipes/r.yaml, `tp1[dev-cpu]` where nothing else is said."""
    usual: dict[str, JsonValue] = {"model": "gpt", "test_case": "tp1", "environment": "dev"}
    usual |= {"platforms": "cpu", "scope": "L0", "cadence": ["pr"]}
    return parse_row(
        Row(line=7, spec={**usual, **spec}, axes=()), file=Path("recipes/r.yaml"), variant=()
    )

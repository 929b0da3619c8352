from __future__ import annotations

import json
from pathlib import Path

from pytest_megatron.recipe.load import json_schema

PUBLISHED = Path(__file__).parents[3] / "docs/reference/recipe.schema.json"


def test_the_published_schema_is_up_to_date() -> None:
    assert PUBLISHED.read_text() == json.dumps(json_schema(), indent=2) + "\n"

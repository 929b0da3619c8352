"""The architecture page against the package and its import contract."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

import pytest_megatron

PACKAGE = Path(pytest_megatron.__file__).parent
EXPLANATION = PACKAGE.parent / "docs" / "explanation"
PAGE = EXPLANATION / "architecture.md"
MOST_MODULES_OF_A_TRIP = 10
_MODULE = re.compile(r"`([a-z_]+(?:/[a-z_]+)+\.(?:py|toml))`")


def test_the_picture_is_that_of_the_import_contract() -> None:
    script = runpy.run_path(str(EXPLANATION / "architecture_picture.py"))
    assert script["picture"]() in PAGE.read_text(encoding="utf-8")


def test_a_trip_passes_at_most_ten_modules() -> None:
    trips = PAGE.read_text(encoding="utf-8").partition("## Three trips")[2].partition("\n## ")[0]
    modules = {
        trip.partition("\n")[0]: set(_MODULE.findall(trip)) for trip in trips.split("\n### ")[1:]
    }
    assert len(modules) == 3
    assert all(6 <= len(passed) <= MOST_MODULES_OF_A_TRIP for passed in modules.values()), modules


@pytest.mark.parametrize("page", sorted(path.name for path in EXPLANATION.glob("*.md")))
def test_modules_that_a_page_names_exist(page: str) -> None:
    named = _MODULE.findall((EXPLANATION / page).read_text(encoding="utf-8"))
    roots = (PACKAGE, PACKAGE.parent)
    assert [n for n in named if not any((root / n).exists() for root in roots)] == []

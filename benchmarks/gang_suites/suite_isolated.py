"""For our gangs: fresh processes for every test."""

from __future__ import annotations

import pytest
from bodies import NUM_TESTS, body

pytestmark = pytest.mark.isolated


@pytest.mark.parametrize("number", range(NUM_TESTS))
@pytest.mark.usefixtures("process_group")
def test_reduce(number: int, rank: int, world_size: int) -> None:
    body(number, rank, world_size)

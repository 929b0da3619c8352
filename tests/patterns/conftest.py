"""Correct ways to communicate, as real suites have them: every one has to pass on every gang.

They run on any device. The unit tests run them on gangs of two to four ranks of the CPU; on GPUs:

    pytest -p megatron --gpus 4 tests/patterns

Each test names the suite that has the pattern. `test_held_out.py` was not looked at while the
counting of collectives was made, and is not to be tuned on.
"""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:  # what torch deprecates is not the point
        item.add_marker(pytest.mark.filterwarnings("default"))

"""What of a workload is done again: which repeat, which phase, on how many ranks."""

from __future__ import annotations

import pytest

from pytest_megatron.errors import LaunchError
from pytest_megatron.workloads.training.plan.plan import Replay


def test_variables_say_it() -> None:
    env = {
        "PYTEST_MEGATRON_REPEAT": "3",
        "PYTEST_MEGATRON_PHASE": "2",
        "PYTEST_MEGATRON_RANKS": "1",
    }
    assert Replay.of(env) == Replay(repeat=3, phase=2, num_ranks=1)
    assert Replay.of({}) == Replay()


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5"])
def test_what_is_no_number_is_one_error(text: str) -> None:
    with pytest.raises(LaunchError, match=f"PYTEST_MEGATRON_REPEAT: is {text!r}, expected a num"):
        Replay.of({"PYTEST_MEGATRON_REPEAT": text})

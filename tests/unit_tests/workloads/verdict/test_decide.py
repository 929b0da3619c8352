from __future__ import annotations

from pathlib import Path

import pytest

from pytest_megatron.runs.layout import AttemptDirs
from pytest_megatron.triage.signatures import match_signature
from pytest_megatron.workloads.verdict.attempt import (
    Attempt,
    FailureCause,
    Verdict,
    decide_training,
)

GENUINE = FailureCause(text="it crashed")
TRANSIENT = FailureCause(text="no port", signature=match_signature(["EADDRINUSE"]))


def attempt(repeat: int, number: int, cause: FailureCause | None) -> Attempt:
    dirs = AttemptDirs(root=Path())
    return Attempt(repeat=repeat, number=number, dirs=dirs, ends=(), metrics=(), cause=cause)


@pytest.mark.parametrize(
    ("causes", "expected"),
    [
        pytest.param([[None]], Verdict.PASSED, id="clean"),
        pytest.param([[None], [None]], Verdict.PASSED, id="clean repeats"),
        pytest.param([[TRANSIENT, None]], Verdict.FLAKY, id="clean at last"),
        pytest.param([[None], [TRANSIENT, None]], Verdict.FLAKY, id="one repeat clean at last"),
        pytest.param([[TRANSIENT, TRANSIENT]], Verdict.BROKEN, id="never"),
        pytest.param([[GENUINE]], Verdict.FAILED, id="crashed"),
        pytest.param([[TRANSIENT, GENUINE]], Verdict.FAILED, id="crashed at last"),
        pytest.param([[None], [GENUINE]], Verdict.FAILED, id="one repeat crashed"),
    ],
)
def test_the_last_attempt_of_every_repeat_decides(
    causes: list[list[FailureCause | None]], expected: Verdict
) -> None:
    attempts = [
        attempt(repeat, number, cause)
        for repeat, row in enumerate(causes, start=1)
        for number, cause in enumerate(row, start=1)
    ]
    assert decide_training(attempts) is expected

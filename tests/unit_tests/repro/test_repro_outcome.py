"""What it means that an item passed or failed again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from chosen_runs import chosen_of
from recorded_runs import a_row, a_test

from pytest_megatron.base.files import JsonValue
from pytest_megatron.repro.command import ReproExit, judge_again


@pytest.mark.parametrize(
    ("again", "expected"),
    [
        pytest.param({"verdict": "passed"}, ReproExit.PASSED, id="passes"),
        pytest.param({"verdict": "flaky"}, ReproExit.PASSED, id="passes when run again"),
        pytest.param({"verdict": "skipped"}, ReproExit.UNKNOWN, id="skipped"),
        pytest.param({"verdict": "broken", "fingerprint": "x"}, ReproExit.UNKNOWN, id="broken"),
        pytest.param({}, ReproExit.SAME, id="the same"),
        pytest.param({"fingerprint": "died|was killed"}, ReproExit.OTHER, id="another failure"),
    ],
)
@pytest.mark.parametrize("record", [a_test(), a_row()], ids=["test", "workload"])
def test_outcomes_suit_git_bisect(
    tmp_path: Path, record: dict[str, JsonValue], again: dict[str, JsonValue], expected: ReproExit
) -> None:
    chosen = chosen_of(tmp_path, record)
    found = replace(chosen.item, **again)  # type: ignore[arg-type]  # of a record
    assert judge_again(chosen, found, 1).exit is expected


@pytest.mark.parametrize(("code", "reason"), [(4, "has no such test"), (2, "import a test")])
def test_an_item_that_did_not_run_says_nothing(tmp_path: Path, code: int, reason: str) -> None:
    outcome = judge_again(chosen_of(tmp_path, a_test()), None, code)
    assert outcome.exit is ReproExit.UNKNOWN
    assert reason in outcome.text

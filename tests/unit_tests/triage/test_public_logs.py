"""Logs that strangers pasted into public issues; `public_logs.py` beside them prints scores."""

from __future__ import annotations

from pathlib import Path

import pytest
from public_logs import PublicLog, ask, is_good, load, summary

LOGS = load()
TUNED = [log for log in LOGS if not log.is_held_out]
HELD_OUT = [log for log in LOGS if log.is_held_out]


@pytest.mark.parametrize("log", LOGS, ids=[log.source.partition("://")[2] for log in LOGS])
def test_a_failure_is_never_called_none_and_a_genuine_one_never_transient(
    log: PublicLog, tmp_path: Path
) -> None:
    told = ask(log, tmp_path)
    assert not told.is_missed, told.line
    assert not told.is_false_hope, told.line


@pytest.mark.parametrize(("half", "logs"), [("tuned", TUNED), ("held-out", HELD_OUT)])
def test_the_family_is_right_in_four_of_five(
    half: str, logs: list[PublicLog], tmp_path: Path
) -> None:
    told = [ask(log, tmp_path) for log in logs]
    assert is_good(told), summary(half, told)


def test_both_halves_have_failures_of_every_chance() -> None:
    assert len(LOGS) == len({log.source for log in LOGS}) >= 60
    for half in (TUNED, HELD_OUT):
        assert {log.chance for log in half} == {"genuine", "transient", "either"}

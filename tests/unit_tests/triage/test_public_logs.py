"""Logs that strangers pasted into public issues."""

from __future__ import annotations

from pathlib import Path

import pytest
from public_logs import PublicLog, ask, load

LOGS = load()


@pytest.mark.parametrize("log", LOGS, ids=[log.source.partition("://")[2] for log in LOGS])
def test_a_failure_is_never_called_none_and_a_genuine_one_never_transient(
    log: PublicLog, tmp_path: Path
) -> None:
    told = ask(log, tmp_path)
    assert not told.is_missed, told.line
    assert not told.is_false_hope, told.line


def test_the_family_is_right_in_four_of_five(tmp_path: Path) -> None:
    wrong = [told for log in LOGS if not (told := ask(log, tmp_path)).is_right]
    assert len(LOGS) >= 60
    assert len(wrong) <= 0.2 * len(LOGS), "\n".join(told.line for told in wrong)

"""Isolated tests: fresh processes each."""

from __future__ import annotations

from pathlib import Path

import pytest
from gang_suite import Suite

pytestmark = pytest.mark.nightly

SUITE = """
    import os
    import time

    import pytest

    pytestmark = pytest.mark.isolated
    DEADLINE_S = 30

    def note(name, rank):
        with open(f"{name}.{rank}", "a") as file:
            file.write(f"{os.getpid()} {os.environ['MASTER_PORT']}\\n")

    def test_first(rank):
        note("pids", rank)

    def test_fails_on_one_rank(rank):
        note("pids", rank)
        assert rank == 0

    def test_dies(rank):
        note("pids", rank)
        if rank:
            os._exit(0)
        time.sleep(DEADLINE_S)

    def test_last(rank):
        note("pids", rank)
    """


@pytest.mark.everyday
def test_every_test_has_processes_of_its_own_whatever_became_of_others(tmp_path: Path) -> None:
    suite = Suite(tmp_path).write(test_isolated=SUITE)
    run = suite.run("-v", "--ranks=2", "-omegatron_rank_grace=0.2")
    assert run.words == {
        "test_first": "PASSED",
        "test_fails_on_one_rank": "FAILED",
        "test_dies": "FAILED",
        "test_last": "PASSED",
    }, run.stdout
    rows = [row.split() for rank in (0, 1) for row in suite.read(f"pids.{rank}")]
    assert len({pid for pid, _ in rows}) == 2 * 4
    assert len({port for _, port in rows}) == 4  # a store of its own

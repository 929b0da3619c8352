"""Every fault once, on gangs of two ranks: the same cases as `tests/faults/run_faults.py` has."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest
from fault_cases import CASES
from fault_checks import Verdict, judge
from fault_sessions import Limits, Session, can_mount, plan, run_session

LIMITS = Limits(grace_s=1.0, hang_s=1.5, slack_s=60.0, session_s=240.0)
NUM_SHARED = 4  # sessions that the faults are spread over: most of their time is waiting
NAMES = [case.name for case in CASES if "cpu" in case.devices]


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Verdict]:
    """Run all of it, as several sessions at a time."""
    chosen = [c for c in CASES if c.name in NAMES and (c.driver != "full_disk" or can_mount())]
    shared = [case for case in chosen if not case.is_alone]
    parts = [shared[start::NUM_SHARED] for start in range(NUM_SHARED)]
    parts.append([case for case in chosen if case.is_alone])
    temp = tmp_path_factory.mktemp("faults")

    def run(session: Session) -> list[Verdict]:
        return judge(session, run_session(session, LIMITS, temp), LIMITS)

    sessions = [
        session
        for part in parts
        for session in plan(part, world_size=2, position="middle", device="cpu", is_single=False)
    ]
    with ThreadPoolExecutor(NUM_SHARED) as pool:
        return {v.case: v for found in pool.map(run, sessions) for v in found}


@pytest.mark.parametrize("name", NAMES)
def test_a_fault_is_told_of_its_test_alone_and_leaves_nothing(
    name: str, verdicts: Mapping[str, Verdict]
) -> None:
    if name not in verdicts:
        pytest.skip("may not mount a file system")
    assert verdicts[name].problems == []

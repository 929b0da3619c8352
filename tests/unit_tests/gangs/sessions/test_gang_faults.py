"""Every fault once, on gangs of two ranks: the same cases as `tests/faults/run_faults.py` has."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fault_cases import CASES
from fault_checks import Verdict, judge
from fault_sessions import Limits, Session, can_mount, plan, read_junit, run_session
from forked_sessions import start_session
from gang_suite import Suite

LIMITS = Limits(grace_s=1.0, hang_s=1.5, slack_s=60.0, session_s=240.0)
NUM_SHARED = 4  # sessions that the faults are spread over: most of their time is waiting
NAMES = [case.name for case in CASES if "cpu" in case.devices]


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Verdict]:
    """Run all of it, as several sessions at a time."""
    chosen = [c for c in CASES if c.name in NAMES and (c.driver != "full_disk" or can_mount())]
    sessions = plan(chosen, world_size=2, position="middle", device="cpu", parts=NUM_SHARED)
    temp = tmp_path_factory.mktemp("faults")

    def run(session: Session) -> list[Verdict]:
        return judge(session, run_session(session, LIMITS, temp, start_session), LIMITS)

    with ThreadPoolExecutor(NUM_SHARED) as pool:
        return {v.case: v for found in pool.map(run, sessions) for v in found}


@pytest.mark.parametrize("name", NAMES)
def test_a_fault_is_told_of_its_test_alone_and_leaves_nothing(
    name: str, verdicts: Mapping[str, Verdict]
) -> None:
    if name not in verdicts:
        pytest.skip("may not mount a file system")
    assert verdicts[name].problems == []


def test_a_death_on_one_gang_costs_those_beside_it_nothing(tmp_path: Path) -> None:
    tests = ["import os, pytest, torch, torch.distributed as dist"]
    for number in range(24):
        size = (1, 2, 4, 2)[number % 4]
        end = f"if rank == {size - 1}: os._exit(1)" if number % 5 == 3 else "pass"
        tests.append(
            f"@pytest.mark.world_size({size})\n"
            f"def test_{number}(process_group, rank):\n"
            f"    dist.all_reduce(torch.ones(1))\n"
            f"    {end}\n"
        )
    suite = Suite(tmp_path).write(test_sizes="\n".join(tests))
    run = suite.run("--ranks=4", "--device=cpu", "--junitxml=junit.xml")
    kinds = {
        name: [k for k, _, _ in found] for name, found in read_junit(tmp_path / "junit.xml").items()
    }
    assert run.returncode == 1, run.stdout
    assert kinds == {
        f"test_{number}": ["failure" if number % 5 == 3 else "passed"] for number in range(24)
    }

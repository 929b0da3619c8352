"""Runs every fault at every place in sessions of real ranks, and checks all that a user relies on.

    python tests/faults/run_faults.py --worlds 2,4,8 --device cpu --positions first,middle,last

A case is right if the guilty test is reported with its rank, at the latest a grace (or the time
limit of a pure hang) after the fault; if all other tests ran to their true outcome; if exit code
and JUnit XML say the same; and if no process is left. Faults that leave the session alive share one
session for each world size and position, each in a file of its own; those that end it have sessions
of their own. Prints a line for each, and exits with 1 if any is wrong. Needs nothing but
the package, torch and pytest.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from fault_cases import CASES, Case
from fault_checks import Verdict, judge
from fault_sessions import Limits, Seen, Session, can_mount, plan, run_session

POSITIONS = ("first", "middle", "last")


def main() -> int:
    """Run what was asked for."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # sessions get Ctrl-C, also in `... &`
    asked = _parse()
    limits = Limits(
        grace_s=asked.grace,
        hang_s=asked.hang_limit or (10.0 if asked.device == "cuda" else 2.0),
        slack_s=asked.slack,
        session_s=asked.session_limit,
    )
    cases = _choose(asked.cases, asked.device)
    sessions = [
        replace(session, ranks_per_gpu=asked.ranks_per_gpu)
        for world_size in asked.worlds
        for position in asked.positions
        for session in plan(
            cases,
            world_size=world_size,
            position=position,
            device=asked.device,
            parts=asked.parts,
        )
    ]
    sessions.sort(key=lambda session: -len(session.slots))  # the long ones first
    started = time.monotonic()
    temp = Path(tempfile.mkdtemp(prefix="faults-"))
    verdicts: list[Verdict] = []

    def run(session: Session) -> list[Verdict]:
        seen = run_session(session, limits, temp)
        found = judge(session, seen, limits)
        print("\n".join(v.line for v in found), flush=True)
        if any(v.problems for v in found):
            print(_quote(seen) if asked.verbose else f"      see {temp}", flush=True)
        return found

    with ThreadPoolExecutor(asked.jobs) as pool:
        for found in pool.map(run, sessions):
            verdicts += found
    num_wrong = sum(bool(v.problems) for v in verdicts)
    print(
        f"{len(verdicts) - num_wrong} right, {num_wrong} wrong, {len(sessions)} sessions "
        f"in {time.monotonic() - started:.0f} s"
    )
    if not num_wrong:
        shutil.rmtree(temp)
    return 1 if num_wrong else 0


def _quote(seen: Seen) -> str:
    return "\n".join(f"      | {line}" for line in seen.output.splitlines())


def _choose(names: Sequence[str], device: str) -> list[Case]:
    unknown = set(names) - {case.name for case in CASES}
    if unknown:
        known = ", ".join(sorted(case.name for case in CASES))
        raise SystemExit(f"--cases: unknown {', '.join(sorted(unknown))}, expected of {known}")
    chosen = [c for c in CASES if device in c.devices and (not names or c.name in names)]
    if any(c.driver == "full_disk" for c in chosen) and not can_mount():
        print("left out: floods_full_disk, as this user may not mount a small disk")
        chosen = [c for c in chosen if c.driver != "full_disk"]
    return chosen


def _parse() -> argparse.Namespace:
    def words(text: str) -> list[str]:
        return [word for word in text.split(",") if word]

    def numbers(text: str) -> list[int]:
        return [int(word) for word in words(text)]

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    option = parser.add_argument
    option("--worlds", type=numbers, default=[2, 4, 8], help="world sizes")
    option("--device", choices=("cpu", "cuda"), default="cpu")
    option("--positions", type=words, default=list(POSITIONS), help="first, middle, last")
    option("--cases", type=words, default=[], help="names; by default all")
    option("--jobs", type=int, default=2, help="sessions at one time")
    option("--parts", type=int, default=1, help="into how many a shared session is divided")
    option("--ranks-per-gpu", type=int, default=1, help="with fewer GPUs than ranks")
    option("--grace", type=float, default=2.0, help="megatron_rank_grace of the sessions")
    option("--hang-limit", type=float, default=0.0, help="time limit of tests that hang")
    option("--slack", type=float, default=10.0, help="what a busy machine may add, in seconds")
    option("--session-limit", type=float, default=600.0, help="for one session, in seconds")
    option("--verbose", action="store_true", help="print the output of sessions that are wrong")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

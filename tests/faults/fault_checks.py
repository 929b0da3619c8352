"""What a session must have said and left: a verdict for each fault in it. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from fault_cases import Case
from fault_sessions import (
    FROM_OUTSIDE,
    JUNIT_WORDS,
    KILLS,
    TRUE_OUTCOMES,
    Limits,
    Seen,
    Session,
    Slot,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of a case.

    Attributes:
        problems: Empty if all is right.
        detection_s: From the fault to the report; to the end, where the session ends in it.
    """

    case: str
    world_size: int
    position: str
    problems: list[str] = field(default_factory=list)
    detection_s: float | None = None

    @property
    def line(self) -> str:
        word = "ok   " if not self.problems else "WRONG"
        seconds = "" if self.detection_s is None else f"{self.detection_s:7.2f} s"
        head = f"{word} world {self.world_size} {self.position:6} {self.case:24}{seconds}"
        return "\n".join([head.rstrip(), *(f"      {p}" for p in self.problems)])


def judge(session: Session, seen: Seen, limits: Limits) -> list[Verdict]:
    """Return a verdict for each case of a session; what belongs to none is in the first."""
    lone = session.lone_case
    wanted = expected_kinds(session)
    general = [
        *_check_session(session, seen, lone, limits),
        *_check_innocents(session, seen, wanted),
    ]
    verdicts: list[Verdict] = []
    for slot in session.slots:
        case = slot.case
        if case is None:
            continue
        reported = session.slots[-1] if case.place == "end" else slot
        detection_s = _detection_s(seen, reported, case)
        problems = _check_case(session, seen, slot, reported, wanted[reported.test], limits)
        verdicts.append(
            Verdict(
                case=case.name,
                world_size=session.world_size,
                position=session.position,
                problems=(general if not verdicts else []) + problems,
                detection_s=seen.end_s if case.driver in FROM_OUTSIDE else detection_s,
            )
        )
    return verdicts


def expected_kinds(session: Session) -> dict[str, str]:
    """Return the kind of JUnit element that each test must have; `none` for no test case."""
    kinds: dict[str, str] = {}
    has_ended = False
    for slot in session.slots:
        outcome = TRUE_OUTCOMES.get(slot.name, "") if slot.case is None else slot.case.outcome
        if slot.case is not None and slot.case.place == "end":
            outcome = "passed"
        has_ended = has_ended or outcome == "none"
        kinds[slot.test] = "none" if has_ended else JUNIT_WORDS.get(outcome, outcome)
    if session.fault_at_end:
        kinds[session.slots[-1].test] = "error"
    return kinds


def _check_session(
    session: Session, seen: Seen, lone: Case | None, limits: Limits
) -> Iterator[str]:
    kinds = set(expected_kinds(session).values())
    if lone is not None and lone.exit_code is not None:
        wanted = lone.exit_code
    else:
        wanted = 1 if kinds & {"failure", "error"} else 0
    if seen.exit_code != wanted:
        yield f"exit code {seen.exit_code}, expected {wanted}"
    if seen.left:
        yield f"processes are left: {'; '.join(seen.left)}"
    for word in ("INTERNALERROR", "PytestUnraisable", "Exception ignored"):
        if word in seen.output:
            yield f"{word} in the output"
    if lone is not None and lone.driver in ("int", "int_int"):
        most = limits.slack_s + (0 if lone.driver == "int_int" else limits.grace_s)
        if seen.end_s > most:
            yield f"ended {seen.end_s:.1f} s after Ctrl-C, at most {most:g} s were expected"


def _check_innocents(session: Session, seen: Seen, wanted: dict[str, str]) -> Iterator[str]:
    is_killed = seen.exit_code is not None and seen.exit_code < 0
    for slot in session.slots:
        kinds = [kind for kind, _, _ in seen.junit.get(slot.test, [])] or ["none"]
        is_reported = session.fault_at_end and slot is session.slots[-1]  # by its case
        if slot.case is None and kinds != [wanted[slot.test]] and not (is_killed or is_reported):
            yield f"{slot.test}: {'+'.join(kinds)}, expected {wanted[slot.test]}"
    # Of a test that ends the session in its call, pytest's own JUnit has an entry without a name.
    # A file that a rank cannot collect has one of its own.
    lacks_file = any(slot.case is not None and slot.case.has_own_file for slot in session.slots)
    files = {n for n in seen.junit if lacks_file and n.startswith("test_guest_")}
    if not is_killed and (others := set(seen.junit) - set(wanted) - files - {"None"}):
        yield f"JUnit has tests that are not there: {sorted(others)}"


def _check_case(
    session: Session, seen: Seen, slot: Slot, reported: Slot, wanted: str, limits: Limits
) -> list[str]:
    case = slot.case
    assert case is not None
    problems: list[str] = []
    guilty = 0 if case.is_first_rank else session.world_size - 1
    facts = {"g": str(guilty), "w": str(session.world_size)}
    if not seen.times("sign", slot.test) and not (case.place == "end" or case.text):
        problems.append("the fault never struck")
    if case.prints and not re.search(_fill(case.prints, facts), seen.output):
        problems.append(f"the output does not say {_fill(case.prints, facts)!r}")
    if case.driver in KILLS:
        return problems
    elements = seen.junit.get(reported.test, [])
    kinds = [kind for kind, _, _ in elements] or ["none"]
    if kinds != [wanted]:
        problems.append(f"JUnit says {'+'.join(kinds)}, expected {wanted}")
    if wanted not in ("failure", "error"):
        return problems
    message, text = next(((m, t) for k, m, t in elements if k == wanted), ("", ""))
    line = rf"(?m)^(?:FAILED|ERROR) \S+::{reported.test} - (.*)$"
    summary = re.search(line, seen.output)
    if summary is None or "rank" not in summary[1]:
        problems.append(f"the summary names no rank: {summary and summary[1]!r}")
    whole = f"{re.sub('^failed on (?:setup|teardown) with .', '', message)}\n{text}"
    if not re.search(_fill(case.says, facts), whole, re.MULTILINE):
        problems.append(f"the report does not say {_fill(case.says, facts)!r} but {whole[:300]!r}")
    problems += _check_blocks(session, case, guilty, text)
    problems += _check_time(seen, reported, case, limits)
    return problems


def _fill(pattern: str, facts: dict[str, str]) -> str:
    return re.sub(r"\{([gw])\}", lambda found: facts[found[1]], pattern)


def _check_blocks(session: Session, case: Case, guilty: int, text: str) -> Iterator[str]:
    """Look for the stack of every rank that hangs, and the list of what each rank did."""
    ranks = set(range(session.world_size))
    hanging = {"": set(), "all": ranks, "others": ranks - {guilty}, "guilty": {guilty}}[
        case.has_stacks
    ]
    shown = {
        n for title in re.findall(r"-+ stack of ranks? (\S.*?) -+\n", text) for n in _numbers(title)
    }
    if missing := hanging - shown:
        yield f"no stack of ranks {sorted(missing)}"
    listed = {n for title in re.findall(r"(?m)^ranks? ([\d, -]+): ", text) for n in _numbers(title)}
    if ranks - listed:
        yield f"does not say what ranks {sorted(ranks - listed)} did"
    if case.has_flight and session.device == "cuda":
        if "collectives, by NCCL's flight recorder" not in text:
            yield "NCCL's flight recorder is not in the report"
        elif re.search(r"(?m)^rank 0: all_reduce, collective \d+ of group", text) is None:
            yield "NCCL's flight recorder does not say what rank 0 waits in"


def _numbers(text: str) -> set[int]:
    """Return the numbers of `0-2, 4`."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def _check_time(seen: Seen, reported: Slot, case: Case, limits: Limits) -> Iterator[str]:
    found = _detection_s(seen, reported, case)
    most = (limits.hang_s if case.sign == "limit" else limits.grace_s) + limits.slack_s
    if found is not None and found > most:
        yield f"reported after {found:.1f} s, at most {most:g} s were expected"


def _detection_s(seen: Seen, reported: Slot, case: Case) -> float | None:
    """Return the time between the fault and the report of its test."""
    signs = seen.times("sign", reported.test)
    reports = [
        float(e["at"])
        for e in seen.events
        if e["event"] == "report" and e["test"] == reported.test and e["outcome"] != "passed"
    ]
    return reports[0] - min(signs) if signs and reports and case.outcome != "passed" else None

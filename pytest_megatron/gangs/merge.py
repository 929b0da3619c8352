"""Results of one execution of a test on its ranks, merged into one outcome: pure.

A test passed only if every rank passed it, and was skipped only if every rank skipped it. A rank
that died, hung or sent no report fails the test. The first failure in time is the headline; ranks
that failed or were stopped because of it are named, not reported as failures of their own.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TypeAlias, cast

from pytest_megatron.base.files import JsonValue
from pytest_megatron.base.text import counted, describe_exit, grouped, name_ranks
from pytest_megatron.gangs.crash import describe_flights, innermost_frame, shorten_stack
from pytest_megatron.gangs.ipc.messages import Done, JsonObject, Outcome, PhaseReport, skip_reason
from pytest_megatron.runs.headline import make_headline, where_ranks_were

LOGS = "logs"  # title of the block with their paths
PHASES = ("setup", "call", "teardown")


class Reason(Enum):
    """Reason why an execution ended."""

    DONE = "every rank ended it"
    FAILED = "a rank failed, and others died or did not end in time"
    DIED = "a rank died"
    HUNG = "the time limit passed"
    NOT_STARTED = "the gang did not start"
    NOT_COLLECTED = "a rank has no such test"
    DESYNCHRONISED = "ranks took part in different collectives"


@dataclass(slots=True, kw_only=True)
class RankResult:
    """Result of one execution on one rank, so far while it runs.

    Attributes:
        done: The rank's message at the end of the test, or None.
        reports: Of each phase and subtest; without `done` only those that did not pass.
        exit_code: `Popen.returncode` of its process if that died by itself.
        at: When it first failed, skipped or died, in seconds of the controller's monotonic clock;
            None if it did neither.
        failed_phase: The phase that it reported as failed or skipped, or "".
        phase: The phase in which it died or was stopped, or "".
        problem: A traceback of pytest itself, or the reason why the rank lacks the test, or "".
        stack: Text of faulthandler if it crashed or had to be stopped, or "".
        flight: JSON of NCCL's flight recorder, or "".
        log_dir: Directory of its logs.
        log_start: Size of its stderr.log when the test began, if that may be rerun.
    """

    rank: int
    done: Done | None = None
    reports: tuple[PhaseReport, ...] = ()
    exit_code: int | None = None
    at: float | None = None
    failed_phase: str = ""
    phase: str = ""
    problem: str = ""
    stack: str = ""
    flight: str = ""
    log_dir: str = ""
    log_start: int | None = None

    def undo(self) -> None:
        """Undo the rank's end of the test: it was lost before the others ended it."""
        self.done = None
        self.reports = tuple(report for report in self.reports if report.outcome != "passed")

    @property
    def is_settled(self) -> bool:
        """True if the rank sends no more messages about this test."""
        return self.done is not None or self.exit_code is not None or bool(self.problem)


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """One report for pytest.

    Attributes:
        when: The phase.
        base: The report of the rank in the headline, as pytest serialised it; None where no rank
            has one.
        message: What failed, if it did, and on which rank.
        where: Where that was, as far as it is known.
        blocks: Title and text of sections of the report beside `base`.
        sections: Captured output, by name.
        start: Earliest of all ranks, seconds since the epoch.
        stop: Latest of all ranks.
        ranks: Outcome of each rank, for tools.
    """

    when: str
    outcome: Outcome
    base: JsonObject | None = None
    message: str = ""
    where: str = ""
    blocks: tuple[tuple[str, str], ...] = ()
    sections: tuple[tuple[str, str], ...] = ()
    properties: tuple[tuple[str, JsonValue], ...] = ()
    start: float = 0.0
    stop: float = 0.0
    ranks: Mapping[str, str] = field(default_factory=dict)

    @property
    def headline(self) -> str:
        """The line that every place shows of a failure."""
        return make_headline("", self.message, where=self.where)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """Result of an execution of a test on its gang.

    Attributes:
        ranks: Results by rank.
        limit_s: The time limit or grace period that passed; 0 without one.
        duration_s: Time since its start on the gang.
        is_kept: Whether the gang may run the next test.
        merged: One report of all ranks for each phase and subtest.
    """

    run: int
    reason: Reason
    ranks: tuple[RankResult, ...]
    limit_s: float
    duration_s: float
    is_kept: bool
    merged: tuple[Merged, ...] = ()

    @property
    def may_end_session(self) -> bool:
        """True if the test has to be reported before another one starts."""
        is_stopped = any(rank.done is not None and rank.done.stop for rank in self.ranks)
        return is_stopped or any(m.outcome == "failed" for m in self.merged)

    def phase(self, when: str) -> Merged:
        """Return the report of a phase; subtests come before their call."""
        return [m for m in self.merged if m.when == when][-1]


Found: TypeAlias = Mapping[int, PhaseReport]  # rank -> what it reported of one phase


def reported(rank: RankResult, when: str) -> PhaseReport | None:
    """Return a phase of a rank, or None if the rank did not end it.

    A rank that did not end the test has passed the phases before its last.
    """
    phases = [report for report in rank.reports if not report.is_subtest]
    found = next((report for report in phases if report.when == when), None)
    if found is None and rank.done is None:
        last = next((p.when for p in phases if p.outcome != "passed"), rank.phase)
        if last in PHASES[PHASES.index(when) + 1 :]:
            return PhaseReport(when, "passed")
    return found


def _found(ranks: Iterable[RankResult], when: str) -> Found:
    return {r.rank: phase for r in ranks if (phase := reported(r, when)) is not None}


def sections_of(found: Found) -> tuple[tuple[str, str], ...]:
    """Return captured output, with the rank in the name where ranks differ."""
    by_name: dict[str, dict[str, list[int]]] = {}
    for rank, phase in found.items():
        for name, text in _pairs(phase, "sections"):
            by_name.setdefault(str(name), {}).setdefault(str(text), []).append(rank)
    return tuple(
        (f"{name} of {name_ranks(ranks)}", text)
        for name, texts in by_name.items()
        for text, ranks in texts.items()
    )


def properties_of(found: Found) -> tuple[tuple[str, JsonValue], ...]:
    """Return the recorded properties, each name and value once, of the lowest rank."""
    kept: list[tuple[str, JsonValue]] = []
    for phase in found.values():
        for name, value in _pairs(phase, "user_properties"):
            if (str(name), value) not in kept:
                kept.append((str(name), value))
    return tuple(kept)


def _pairs(phase: PhaseReport, key: str) -> list[list[JsonValue]]:
    return cast("list[list[JsonValue]]", (phase.full or {}).get(key) or [])


# Errors of ranks whose peer died or was stopped.
CONSEQUENCE = re.compile(
    r"Connection (?:closed|reset) by peer|Connection refused|Broken pipe|ncclRemoteError"
    r"|NCCL communicator was aborted|Socket closed|Read error|Timed out waiting \d+ms for"
)


def is_consequence(rank: RankResult) -> bool:
    """Return whether a rank failed only because a peer of it had died or was stopped."""
    phase = reported(rank, rank.failed_phase) if rank.failed_phase else None
    return phase is not None and CONSEQUENCE.search(phase.text) is not None


def _word(end: RunEnd, rank: RankResult, when: str, failure: PhaseReport | None) -> str:
    """Describe in a few words what a rank did in a phase."""
    if failure is not None:
        consequence = CONSEQUENCE.search(failure.text)
        text = f"failed: {failure.message if consequence is None else consequence[0]}"
        if rank.done is None and (rank.exit_code is not None or rank.phase != when):
            text += f", then {_end_word(end, rank)}"
        return text if consequence is None else f"{text} (a consequence)"
    if rank.done is None:
        return _end_word(end, rank)
    return _done_word(end, rank, rank.done.num_collectives)


def _done_word(end: RunEnd, rank: RankResult, num_collectives: int) -> str:
    """Describe what a rank did that ended the test."""
    for phase in (p for name in PHASES if (p := reported(rank, name)) is not None):
        if phase.outcome != "passed":
            return _phase_word(phase)
    if end.reason is Reason.DESYNCHRONISED:
        return f"passed after {counted(num_collectives, 'collective')}"
    return "passed"


def _phase_word(phase: PhaseReport) -> str:
    """Return the outcome of a phase or subtest on one rank, with its reason."""
    match phase.outcome:
        case "skipped":
            return f"skipped: {skip_reason(phase.full)}"
        case "failed":
            return f"failed: {phase.message}"
        case _:
            return "passed"


def _end_word(end: RunEnd, rank: RankResult) -> str:
    """Return the end of a rank that did not end the test."""
    if rank.problem:
        problem = rank.problem.strip().splitlines()[-1]
        return f"did not start: {problem}" if end.reason is Reason.NOT_STARTED else problem
    frame = innermost_frame(rank.stack)
    where = f" at {frame}" if frame else ""
    if rank.exit_code is not None:
        phase = f" in {rank.phase}" if rank.phase not in ("", "call") else ""
        return f"{describe_exit(rank.exit_code)}{phase}{where}"
    if end.reason is Reason.NOT_COLLECTED:
        return "did not run it"
    if end.reason is Reason.NOT_STARTED:
        return "did not start" if end.limit_s else "was stopped before it started"
    return f"was still in {rank.phase or 'the test'}{where}, and was stopped"


def split_message(end: RunEnd, words: Mapping[int, str]) -> str:
    """Return the headline of a failure that no single rank caused."""
    match end.reason:
        case Reason.HUNG:
            late = [r.rank for r in end.ranks if r.done is None]
            return f"{name_ranks(late)} did not end in {end.limit_s:g} s"
        case Reason.DESYNCHRONISED:
            return (
                "every rank passed, but they took part in different collectives of the default "
                "process group; the next test would have met what is left"
            )
        case Reason.NOT_STARTED:
            return f"the gang did not start in {end.limit_s:g} s"
        case _:
            skipped = [rank for rank, word in words.items() if word.startswith("skipped")]
            others = [rank for rank in words if rank not in skipped]
            if skipped and others:
                return f"{name_ranks(skipped)} skipped, {name_ranks(others)} did not"
            return str(end.reason.value)


def describe_ranks(words: Mapping[int, str], first: int | None) -> str:
    """Return a line for each outcome with its ranks, the first failure on top."""
    groups = grouped((words[rank], rank) for rank in sorted(words, key=lambda r: (r != first, r)))
    return "\n".join(f"{name_ranks(ranks)}: {word}" for word, ranks in groups.items())


_ADDRESS = re.compile(r"0x[0-9a-f]+")
_ADDRESS_OF_THREAD = re.compile(r"(?m)^((?:Current t|T)hread) 0x[0-9a-f]+")


def merge(end: RunEnd, world_size: int) -> tuple[Merged, ...]:
    """Return the reports of one execution, in the order in which pytest reports them.

    Subtests come before the call that they belong to.
    """
    if _is_plain(end):
        return _merge_plain(end)
    end = _with_lost_peers_in_call(end)
    merged: list[Merged] = []
    waiting = _waiting_in_setup(end)
    has_ended = False
    for when in PHASES:
        if has_ended and when == "call":
            continue
        is_reported = when == "teardown" and any(m.outcome == "failed" for m in merged)
        if is_reported and not any(_has_failed(rank, when) for rank in end.ranks):
            continue  # ranks stopped in teardown are a consequence of a reported failure
        phase = _merge_phase(end, when, world_size, waiting)
        if phase is None:
            continue
        if when == "call":
            merged += _merge_subtests(end)
        merged.append(phase)
        has_ended = has_ended or (when == "setup" and phase.outcome != "passed")
    if not merged or merged[0].when != "setup":
        merged.insert(0, Merged(when="setup", outcome="passed"))
    must_fail = end.reason is not Reason.DONE or any(r.done is None for r in end.ranks)
    if must_fail and all(m.outcome == "passed" for m in merged):
        merged = [merged[0], _fail(end, "call", {}, world_size)]
    if not any(m.when == "teardown" for m in merged):
        stop = merged[-1].stop
        merged.append(Merged(when="teardown", outcome="passed", start=stop, stop=stop))
    return tuple(merged)


def merge_late(reports: Found, log_dirs: Sequence[str]) -> Merged:
    """Return the report of a teardown that failed after the test was reported.

    Args:
        reports: Those of ranks in which it failed.
        log_dirs: Log directory of each rank of the gang.
    """
    ranks = tuple(
        RankResult(
            rank=rank,
            done=Done(run=0),
            reports=(reports[rank],) if rank in reports else (),
            log_dir=log_dir,
        )
        for rank, log_dir in enumerate(log_dirs)
    )
    end = RunEnd(run=0, reason=Reason.DONE, ranks=ranks, limit_s=0.0, duration_s=0.0, is_kept=False)
    return _fail(end, "teardown", reports, len(ranks))


def _is_plain(end: RunEnd) -> bool:
    """Return whether every rank passed every phase without output, as for nearly all tests."""
    return end.reason is Reason.DONE and all(
        rank.done is not None
        and len(rank.reports) == len(PHASES)
        and all(report.full is None for report in rank.reports)
        for rank in end.ranks
    )


def _merge_plain(end: RunEnd) -> tuple[Merged, ...]:
    """Merge a test that passed on all ranks without output: each phase from first to last rank."""
    return tuple(
        Merged(
            when=when,
            outcome="passed",
            start=min(report.start for report in reports),
            stop=max(report.stop for report in reports),
        )
        for when, *reports in zip(PHASES, *(rank.reports for rank in end.ranks), strict=True)
    )


def _has_failed(rank: RankResult, when: str) -> bool:
    """Return whether a rank failed a phase by itself."""
    phase = reported(rank, when)
    is_failure = phase is not None and phase.outcome == "failed"
    return is_failure and not (phase and CONSEQUENCE.search(phase.text))


def _merge_phase(end: RunEnd, when: str, world_size: int, waiting: set[int]) -> Merged | None:
    """Merge the reports of one phase, None if no rank has one."""
    found = _found(end.ranks, when)
    struck = [
        "call" if r.rank in waiting else r.phase or "call" for r in end.ranks if r.done is None
    ]
    if when in struck:
        xfailed = [p for p in found.values() if p.is_xfail and p.outcome == "skipped"]
        late = [r for r in end.ranks if r.done is not None or _is_late(r)]
        if xfailed and _are_expected(found) and len(late) == len(end.ranks):
            return _merged(when, "skipped", found, xfailed[0].full)  # others waited for it
        return _fail(end, when, found, world_size)
    if not found:
        return None
    if when == "setup" and waiting and all(p.outcome == "passed" for p in found.values()):
        return _passed(when, found)
    return _merge_reported(end, when, found, world_size)


def _waiting_in_setup(end: RunEnd) -> set[int]:
    """Return ranks stopped in set-up only because of one that had passed it, and failed later.

    The last collective of a set-up may end on one rank before it ends on others; if that one dies,
    the test failed in the phase in which it died.
    """
    late = {r.rank for r in end.ranks if r.done is None and r.phase == "setup" and _is_late(r)}
    return late if late and _has_passed_setup(_guilty(end)) else set()


def _guilty(end: RunEnd) -> RankResult | None:
    """Return the rank that first died or failed by itself, or None."""
    guilty = [r for r in end.ranks if _is_dead(r) or any(_has_failed(r, w) for w in PHASES)]
    return min(guilty, key=_when_failed, default=None)


def _has_passed_setup(rank: RankResult | None) -> bool:
    setup = None if rank is None else reported(rank, "setup")
    return setup is not None and setup.outcome == "passed"


def _with_lost_peers_in_call(end: RunEnd) -> RunEnd:
    """Return an end in which ranks that lost a peer in set-up failed in the call.

    The peer had passed its set-up and died in the call: how far the others were is chance.
    """
    lost = {
        rank: setup
        for rank, setup in _found(end.ranks, "setup").items()
        if setup.outcome == "failed" and CONSEQUENCE.search(setup.text)
    }
    if not lost or not _has_passed_setup(_guilty(end)):
        return end
    ranks = list(end.ranks)
    for rank, setup in lost.items():
        others = (report for report in ranks[rank].reports if report is not setup)
        passed = PhaseReport("setup", "passed", setup.start, setup.start)
        reports = (passed, replace(setup, when="call"), *others)
        ranks[rank] = replace(ranks[rank], reports=reports)
    return replace(end, ranks=tuple(ranks))


def _merge_reported(end: RunEnd, when: str, found: Found, world_size: int) -> Merged:
    """Merge a phase in which no rank died or was stopped; ranks that ended before it have none."""
    failed = [p for p in found.values() if p.outcome == "failed"]
    skipped = [p for p in found.values() if p.outcome == "skipped"]
    xfailed = [p for p in skipped if p.is_xfail]
    if xfailed and _are_expected(found):
        return _merged(when, "skipped", found, xfailed[0].full)  # as a whole it failed, as expected
    is_unanimous = len(found) == world_size and len(skipped) in (0, world_size)
    if failed or not (is_unanimous or when != "call"):
        return _fail(end, when, found, world_size)  # a rank may also have skipped in set-up
    if skipped and not is_unanimous:
        if when == "setup":  # a split skip is a failure of the test, not an error of its set-up
            passed = {rank: p for rank, p in found.items() if p.outcome == "passed"}
            return _passed(when, passed or found)
        return _fail(end, when, found, world_size)
    if skipped:
        return _merged(when, "skipped", found, skipped[0].full)
    xpassed = [p for p in found.values() if p.is_xfail]
    return _merged(when, "passed", found, xpassed[0].full) if xpassed else _passed(when, found)


def _are_expected(found: Found) -> bool:
    """Return whether every rank passed or failed as expected by xfail."""
    phases = found.values()
    return all(p.outcome == "passed" or p.is_xfail or _is_strict_xpass(p) for p in phases)


def _is_late(rank: RankResult) -> bool:
    """Return whether a rank was stopped, and did not end by itself."""
    return rank.exit_code is None and not rank.problem


def _is_dead(rank: RankResult) -> bool:
    """Return whether a rank ended by itself before the end of the test."""
    return rank.done is None and not _is_late(rank)


def _when_failed(rank: RankResult) -> tuple[float, int]:
    return float("inf") if rank.at is None else rank.at, rank.rank


def _is_strict_xpass(phase: PhaseReport) -> bool:
    return phase.outcome == "failed" and phase.text.startswith("[XPASS(strict)]")


def _passed(when: str, found: Found) -> Merged:
    full = [p.full for p in found.values() if p.outcome == "passed" and p.full is not None]
    return _merged(when, "passed", found, full[0] if full else None)


def _merged(when: str, outcome: Outcome, found: Found, base: JsonObject | None) -> Merged:
    """Return the report of a phase with sections and properties of several ranks."""
    return Merged(
        when=when,
        outcome=outcome,
        base=base,
        sections=sections_of(found),
        properties=properties_of(found),
        start=_start(found),
        stop=max(p.stop for p in found.values()),
    )


def _start(found: Found) -> float:
    """Return the earliest known start of a rank, or 0."""
    return min([p.start for p in found.values() if p.start], default=0.0)


def _fail(end: RunEnd, when: str, found: Found, world_size: int) -> Merged:
    """Return a failure: the first rank, independent failures, and consequences."""
    failed = {rank: p for rank, p in found.items() if p.outcome == "failed"}
    struck = {r.rank: r for r in end.ranks if r.done is None}
    first = _first(end, failed)
    words = {rank.rank: _word(end, rank, when, failed.get(rank.rank)) for rank in end.ranks}
    blocks: list[tuple[str, str]] = []
    base, where = None, ""
    if first is None:
        message = split_message(end, words)
        if end.reason is Reason.HUNG:
            where = where_ranks_were({r: innermost_frame(one.stack) for r, one in struck.items()})
    elif first in failed:
        base, where = failed[first].full, failed[first].where
        message = f"[rank {first}] {failed[first].message}"
    else:
        message = f"rank {first} of {world_size} {words[first]}"
        if len(set(words.values())) == 1 and world_size > 1:
            word = words[first]
            plural = f"were{word.removeprefix('was')}" if word.startswith("was ") else word
            message = f"{name_ranks(list(words))} {plural}"
    blocks.append(("ranks", describe_ranks(words, first)))
    blocks += _other_failures(failed, first, words)
    blocks += _stacks(end)
    blocks += _logs(end, first, struck)
    shown_rank = next(iter(found), None) if first is None else first
    shown = {rank: phase for rank, phase in found.items() if rank == shown_rank}
    start = _start(found)
    return Merged(
        when=when,
        outcome="failed",
        base=base,
        message=message,
        where=where,
        blocks=tuple(blocks),
        sections=sections_of(shown),
        properties=properties_of(found),
        start=start,
        stop=max([p.stop for p in found.values()] + [start + end.duration_s]),
        ranks={str(rank): text for rank, text in words.items()},
    )


def _first(end: RunEnd, failed: Found) -> int | None:
    """Return the rank that caused the failure; None where no single rank did."""

    def order(rank: RankResult) -> tuple[bool, float, int]:
        """Sort ranks by the time at which they failed, consequences last."""
        phase = failed.get(rank.rank)
        is_consequence = phase is not None and CONSEQUENCE.search(phase.text) is not None
        return is_consequence, *_when_failed(rank)

    guilty = [r for r in end.ranks if r.rank in failed or _is_dead(r)]
    return min(guilty, key=order).rank if guilty else None


def _other_failures(
    failed: Found, first: int | None, words: Mapping[int, str]
) -> list[tuple[str, str]]:
    """Return tracebacks of other source lines than the headline's, one for each line.

    The values of other ranks that fail at the same line are in the block about ranks.
    """
    headline = failed.get(first) if first is not None else None
    seen = set() if headline is None else {_normalise(headline.text)}
    groups = grouped(
        (text, rank)
        for rank, phase in failed.items()
        if rank != first
        and (text := _normalise(phase.text)) not in seen
        and not words[rank].endswith("(a consequence)")
    )
    shown = set() if headline is None else {headline.place}
    blocks: list[tuple[str, str]] = []
    for ranks in groups.values():
        phase = failed[ranks[0]]
        if phase.place is None or phase.place not in shown:
            shown.add(phase.place)
            blocks.append((f"failure of {name_ranks(ranks)}", phase.text))
    return blocks


def _normalise(text: str) -> str:
    return _ADDRESS.sub("0x", text)


def _stacks(end: RunEnd) -> list[tuple[str, str]]:
    """Return the stacks of ranks that had to be stopped, equal ones once."""
    groups = grouped(
        (shorten_stack(_ADDRESS_OF_THREAD.sub(r"\1", rank.stack)), rank.rank)
        for rank in end.ranks
        if rank.stack
    )
    blocks = [(f"stack of {name_ranks(ranks)}", text) for text, ranks in groups.items()]
    flights = {r.rank: r.flight for r in end.ranks if r.flight}
    if flights and (text := describe_flights(flights)):
        blocks.append(("collectives, by NCCL's flight recorder", text))
    return blocks


def _logs(
    end: RunEnd, first: int | None, struck: Mapping[int, RankResult]
) -> list[tuple[str, str]]:
    """Return problems of dead ranks, and the paths of logs."""
    groups = grouped((rank.problem, rank.rank) for rank in struck.values() if "\n" in rank.problem)
    blocks = [(name_ranks(ranks), problem) for problem, ranks in groups.items()]
    shown = [end.ranks[first]] if first is not None else [r for r in end.ranks if r.rank in struck]
    files = [
        f"{rank.log_dir}/{name}"
        for rank in shown
        if rank.log_dir
        for name in ("stderr.log", *(["stacks.txt"] if rank.stack else []))
    ]
    if files and end.reason is not Reason.NOT_COLLECTED:
        blocks.append((LOGS, "\n".join(files)))
    return blocks


def _merge_subtests(end: RunEnd) -> list[Merged]:
    """Merge subtests of equal names over the ranks, in the order of the first rank with them."""
    by_key: dict[str, dict[int, PhaseReport]] = {}
    for rank in (rank for rank in end.ranks if rank.done is not None):
        seen: Counter[str] = Counter()
        for report in (report for report in rank.reports if report.is_subtest):
            key = str((report.full or {}).get("_subtest.context"))
            seen[key] += 1
            by_key.setdefault(f"{key} {seen[key]}", {})[rank.rank] = report
    return [_merge_subtest(end, found) for found in by_key.values()]


def _merge_subtest(end: RunEnd, found: Found) -> Merged:
    """Merge one subtest by the rules for tests; ranks without it are ignored."""
    failed = [rank for rank, p in found.items() if p.outcome == "failed"]
    skipped = [rank for rank, p in found.items() if p.outcome == "skipped"]
    xfailed = [p for p in found.values() if p.is_xfail]
    if xfailed and not failed:
        return _merged("call", xfailed[0].outcome, found, xfailed[0].full)
    if not failed and len(skipped) in (0, len(found)):
        one = next(iter(found.values()))
        return _merged("call", one.outcome, found, one.full)
    rank = [*failed, *skipped][0]
    chosen = found[rank]
    words = {rank: _phase_word(p) for rank, p in found.items()}
    message = f"[rank {rank}] {chosen.message}" if failed else split_message(end, words)
    where = chosen.where if failed else ""
    blocks = [("ranks", describe_ranks(words, rank))]
    blocks += _other_failures(
        {rank: found[rank] for rank in failed}, rank if failed else None, words
    )
    merged = _merged("call", "failed", found, chosen.full)
    return replace(merged, message=message, where=where, blocks=tuple(blocks))

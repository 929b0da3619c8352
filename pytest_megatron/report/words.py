"""What became of each rank, in a few words: pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from pytest_megatron.gang.spec import RankResult, Reason, RunEnd
from pytest_megatron.report.crash import innermost_frame
from pytest_megatron.report.phase import PHASES, PhaseReport, reported, skip_reason
from pytest_megatron.wording import describe_exit, name_ranks

# What ranks say when another rank died or was stopped under them.
CONSEQUENCE = re.compile(
    r"Connection (?:closed|reset) by peer|Connection refused|Broken pipe|ncclRemoteError"
    r"|NCCL communicator was aborted|Socket closed|Read error|Timed out waiting \d+ms for"
)


def words_of_ranks(end: RunEnd, when: str, failed: Mapping[int, PhaseReport]) -> dict[int, str]:
    """Return what each rank did, in a few words."""
    return {rank.rank: _word(end, rank, when, failed.get(rank.rank)) for rank in end.ranks}


def _word(end: RunEnd, rank: RankResult, when: str, failure: PhaseReport | None) -> str:
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
    for phase in (p for name in PHASES if (p := reported(rank, name)) is not None):
        if phase.outcome == "skipped":
            return f"skipped: {skip_reason(phase)}"
        if phase.outcome == "failed":
            return f"failed: {phase.message}"
    if end.reason is Reason.DESYNCHRONISED:
        return f"passed after {num_collectives} collectives"
    return "passed"


def _end_word(end: RunEnd, rank: RankResult) -> str:
    """Return how a rank ended that did not end the test."""
    if rank.problem:
        problem = rank.problem.strip().splitlines()[-1]
        return f"did not start: {problem}" if end.reason is Reason.NOT_STARTED else problem
    if rank.exit_code is not None:
        where = f" in {rank.phase}" if rank.phase not in ("", "call") else ""
        return f"{describe_exit(rank.exit_code)}{where}"
    return _late_word(end, rank)


def _late_word(end: RunEnd, rank: RankResult) -> str:
    frame = innermost_frame(rank.stack)
    where = f" at {frame}" if frame else ""
    if end.reason is Reason.NOT_COLLECTED:
        return "did not run it"
    if end.reason is Reason.NOT_STARTED:
        return "did not start" if end.limit_s else "was stopped before it started"
    return f"was still in {rank.phase or 'the test'}{where}, and was stopped"


def split_message(end: RunEnd, words: Mapping[int, str]) -> str:
    """Return the headline of a failure for which no rank is to blame."""
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


def tell_ranks(words: Mapping[int, str], first: int | None) -> str:
    """Return a line for each thing that ranks did, the first failure on top."""
    groups: dict[str, list[int]] = {}
    for rank in sorted(words, key=lambda r: (r != first, r)):
        groups.setdefault(words[rank], []).append(rank)
    return "\n".join(f"{name_ranks(ranks)}: {word}" for word, ranks in groups.items())


def subtest_word(phase: PhaseReport) -> str:
    """Return what a rank did in a subtest."""
    if phase.outcome == "skipped":
        return f"skipped: {skip_reason(phase)}"
    return f"failed: {phase.message}" if phase.outcome == "failed" else "passed"

"""Puts a root cause into words, and into the data that is printed as JSON."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_megatron.base.text import name_ranks
from pytest_megatron.runs.headline import make_headline
from pytest_megatron.runs.record import RecordedDiagnosis, RecordedEvidence
from pytest_megatron.triage.logs.lines import parse_iteration
from pytest_megatron.triage.logs.scan import line_number
from pytest_megatron.triage.rank_log import End, LogLine, RankLog, Root
from pytest_megatron.triage.signatures import RetryAdvice, Signature

_MOST_EVIDENCE_TEXT = 500
_PATH = re.compile(r"""['"](/[^'"]+)['"]""")  # that a message names
_POLICIES = {
    RetryAdvice.NEVER: "running it again unchanged gives the same",
    RetryAdvice.DIAGNOSE: "one more run is worth it with diagnostics, to learn more, not to pass",
    RetryAdvice.OTHER_NODE: "another node or GPU is expected to pass",
    RetryAdvice.NEW_PORT: "another port is expected to pass at once",
    RetryAdvice.BACKOFF: "it is expected to pass after a while",
    RetryAdvice.FREE: "it is expected to pass when it is submitted again",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Cause of the failure of one launch.

    Attributes:
        row: The signature that it is known as.
    """

    row: Signature
    record: RecordedDiagnosis


def diagnose(rank_log: RankLog, root: Root) -> Diagnosis:
    """Describe a root cause: who failed, how, where, when, and what to do.

    Reads the logs up to the lines that are shown, to count them.
    """
    printed = (parse_iteration(place.text) for place in root.places)
    iteration = next(filter(None, printed), rank_log.iteration)  # that it failed in, or after
    evidence = _evidence(rank_log, root)
    exits = {str(rank): one.how for rank, one in rank_log.ranks.items() if one.how}
    row = root.signature
    headline = _headline(rank_log, root, iteration)
    record = RecordedDiagnosis(
        family=row.family,
        transient=row.is_transient,
        root_rank=root.ranks[0] if root.ranks else None,
        signature=row.id,
        evidence=evidence,
        headline=headline,
        text=_paragraph(headline, rank_log, root),
        reason=_reason(row),
        policy=row.policy.value,
        advice=row.advice,
        source=row.source,
        next=_command(evidence, rank_log, root),
        root_ranks=root.ranks,
        is_every_rank=root.is_all,
        world_size=rank_log.world_size,
        exits=exits,
        iteration=None if iteration is None else iteration[0],
        last_iteration=None if iteration is None else iteration[1],
        fingerprint=_fingerprint(root),
        unit=rank_log.unit.name,
        notes=rank_log.notes,
    )
    return Diagnosis(row=row, record=record)


def _reason(signature: Signature) -> str:
    """Return whether a cause is transient and what that means, also of a row that says both.

    A table, or a recipe's row, may have made a signature transient without a policy for it.
    """
    is_hopeless = signature.policy in (RetryAdvice.NEVER, RetryAdvice.DIAGNOSE)
    if signature.is_transient:
        return f"transient: {_POLICIES[RetryAdvice.FREE if is_hopeless else signature.policy]}"
    return f"not transient: {_POLICIES[signature.policy if is_hopeless else RetryAdvice.NEVER]}"


def _headline(rank_log: RankLog, root: Root, iteration: tuple[int, int | None] | None) -> str:
    """Return who did what, where and when."""
    where, when = root.where or root.frame or "", _when(rank_log, iteration)
    line = make_headline(_who(rank_log, root), root.what, where=where, when=when)
    return f"{line}; {root.then}" if root.then else line


def _paragraph(headline: str, rank_log: RankLog, root: Root) -> str:
    """Return the headline, what it means, and what the others did."""
    also = (f"{text[0].upper()}{text[1:]}" for text in (headline, *root.also))
    sentences = [f"{text.rstrip('.')}." for text in also]
    followed = [
        rank
        for rank, told in rank_log.ranks.items()
        if rank not in root.ranks
        and (told.fatal is not None or told.how not in ("", "exit code 0"))
    ]
    if followed and root.ranks:
        verb = "follows" if len(followed) == 1 else "follow"
        text = name_ranks(followed)
        sentences.append(f"{text[0].upper()}{text[1:]} only {verb} from it.")
    return " ".join(sentences)


def _who(rank_log: RankLog, root: Root) -> str:
    """Name who failed: ranks, the launcher or the program."""
    if root.who is not None:
        return root.who
    if not root.ranks:
        return rank_log.unit.known.program or ("the launcher" if rank_log.ranks else "the program")
    if root.is_all:
        return f"every one of {rank_log.world_size} ranks"
    of = f" of {rank_log.world_size}" if rank_log.world_size > 1 else ""
    return f"{name_ranks(root.ranks)}{of}"


_QUIET_S = 10.0  # a training that goes on is rarely silent for so long


def _when(rank_log: RankLog, iteration: tuple[int, int | None] | None) -> str:
    """Describe how far the training was, and how long it had been silent where a limit ended it."""
    known = rank_log.unit.known
    when = "before the first iteration that was logged" if rank_log.unit.logs else ""
    if iteration is not None:
        last = "" if iteration[1] is None else f" of {iteration[1]}"
        when = f"after iteration {iteration[0]}{last}"
    elif known.far is not None:
        when = f"after {known.far}"
    is_silent = known.ended is End.TIME_LIMIT and known.quiet_s >= _QUIET_S
    return f"{when}, nothing logged for {known.quiet_s:.0f} s" if is_silent else when


def _evidence(rank_log: RankLog, root: Root) -> tuple[RecordedEvidence, ...]:
    """Return the lines that show a cause, each once; without one the end of the rank's log."""
    places = root.places
    if not places and root.ranks and root.ranks[0] in rank_log.ranks:
        places = rank_log.ranks[root.ranks[0]].last_words[-2:]
    places = places or rank_log.launcher.last_words[-3:]
    found: dict[tuple[str, int], RecordedEvidence] = {}
    for place in places:
        evidence = evidence_of(place, root.ranks[0] if root.ranks else None)
        found[evidence.file, evidence.line] = evidence
    return tuple(found.values())


def evidence_of(place: LogLine, rank: int | None) -> RecordedEvidence:
    """Return a line of a log as it is shown.

    Reads the log up to that line, to count it.

    Args:
        place: Where it is.
        rank: Whose it is, where its log is not one rank's own.
    """
    try:
        line = line_number(place.log.path, place.offset)
    except OSError:
        line = 1
    return RecordedEvidence(
        file=place.log.shown,
        line=line,
        text=place.text.strip()[:_MOST_EVIDENCE_TEXT],
        rank=place.log.rank if place.log.rank is not None else rank,
    )


def _command(evidence: Sequence[RecordedEvidence], rank_log: RankLog, root: Root) -> str:
    """Return what to type next: the signature's command, or what shows the evidence."""
    said = root.message or "\n".join(place.text for place in root.places)
    words: dict[str, str] = {}
    if evidence:
        words |= {"file": shlex.quote(evidence[0].file), "line": str(evidence[0].line)}
    if (path := _PATH.search(said)) is not None:
        words["directory"] = shlex.quote(str(Path(path[1]).parent))
    for template in (root.signature.command, "less +{line} {file}"):
        if template is not None and set(re.findall(r"\{(\w+)\}", template)) <= words.keys():
            if "{file}" in template and "!" in words["file"]:
                continue  # a member of an archive
            return re.sub(r"\{(\w+)\}", lambda m: words[m[1]], template)
    return f"ls -l {shlex.quote(rank_log.unit.name)}"


def _fingerprint(root: Root) -> str:
    """Return what failures of one cause have in common: no numbers, no addresses, no paths."""
    said = (root.message or root.what).partition("\n")[0]
    plain = re.sub(r"0x[0-9a-f]+|/\S+/|\d+", "#", said)
    where = re.sub(r":\d+", "", root.frame or "")
    return "|".join((root.signature.id, where, plain[:160]))

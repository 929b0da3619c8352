"""Puts a root cause into words, and into the data that is printed as JSON."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_megatron.base.text import name_ranks
from pytest_megatron.runs.headline import make_headline
from pytest_megatron.runs.record import RecordedDiagnosis, RecordedEvidence
from pytest_megatron.triage.logs.lines import parse_iteration
from pytest_megatron.triage.logs.scan import line_number
from pytest_megatron.triage.rank_log import End, LogLine, RankLog, Root
from pytest_megatron.triage.signatures import RetryAdvice, Signature

# Where in a training a frame is; the first that some frame matches, innermost frame first. Only
# names that say one thing in every program: a wrong place costs more than none.
_PHASES = {
    "saving a checkpoint": r" in (?:save_\w*checkpoint\w*|async_save)\b"
    r"|serialization\.py:\d+ in _save$",
    "loading a checkpoint": r" in (?:load_\w*checkpoint\w*|load_state_dict|_load_state\w*)\b",
    "evaluation": r" in (?:evaluate\w*|eval_step|validation_step|validate(?:_epoch|_model)?)$",
    "the backward pass": r" in (?:backward\w*|_backward\w*|backward_step)\b",
    "the optimizer's step": r"optim\w*\.py:\d+ in (?:wrapper|\w*step\w*|_use_grad\w*)"
    r"| in (?:optimizer_step|step_optimizer|clip_grad\w*)",
    "the forward pass": r" in (?:forward\w*|_forward\w*|loss_func|_call_impl)\b",
    "loading data": r" in (?:\w*next_batch|get_batch\w*|__next__|_next_data|\w*data_?loader\w*"
    r"|(?:load|build|get|make|prepare)_\w*dataset\w*)\b",
    "setting up ranks": r" in (?:init_process_group|_?initialize_(?:distributed|megatron)"
    r"|initialize_model_parallel|\w*rendezvous\w*|_create_c10d_store)\b",
    "building the model": r" in (?:get_model|model_provider|setup_model\w*|build_model)\b",
    "start-up": r" in <module>$",
}
_BEFORE_TRAINING = ("setting up ranks", "building the model", "start-up")
_TRAINING = re.compile(r" in (?:_?train\w*|fit\w*|\w+_step)$")  # holds all phases, and is none
_MEMORY = {
    "tried_to_allocate": r"Tried to allocate (\S+ \w+)|you tried to allocate (\d+ bytes)",
    "free": r"of which (\S+ \w+) is free|; (\S+ \w+) free",
    "total": r"total capacity of (\S+ \w+)|([\d.]+ \w+) total capacity",
    "gpu": r"\bGPU (\d+)\b",
    "in_use": r"this process has (\S+ \w+) memory in use",
}
_OTHER = re.compile(r"Process (\d+) has (\S+ \w+) memory in use")
_FACTS = {
    "cuda_oom": _MEMORY,
    "host_oom": _MEMORY,
    "port_in_use": {"port": r"\bport: ?(\d+)|:(\d{4,5})\b"},
}
_PATH = {"path": r"'(/[^']+)'|\"(/[^\"]+)\""}


def phase_of(frames: Sequence[str], *, has_trained: bool = False) -> str | None:
    """Return the phase of the training that a traceback is in, None if it is not sure.

    Args:
        frames: `file:line in name`, outermost first.
        has_trained: Whether an iteration is known to be done, so that it is past its beginning.
    """
    for frame in reversed(frames):
        for phase, pattern in _PHASES.items():
            is_past = has_trained and phase in _BEFORE_TRAINING
            if re.search(pattern, frame) and not (phase == "start-up" and len(frames) > 1):
                return None if is_past else phase
        if _TRAINING.search(frame):  # what it was called from is no phase
            return None
    return None


def facts_of(root: Root) -> dict[str, str]:
    """Return the sizes of memory, the port or the path in a failure's message."""
    text = root.message or "\n".join(place.text for place in root.places)
    patterns = _FACTS.get(root.signature.family, _PATH)
    matches = {name: re.search(pattern, text) for name, pattern in patterns.items()}
    facts = {
        name: next(group for group in match.groups() if group is not None)
        for name, match in matches.items()
        if match is not None
    }
    others = [f"{pid} ({size})" for pid, size in _OTHER.findall(text)]
    if patterns is _MEMORY and others:
        facts["other_processes"] = ", ".join(others)
    return facts


_MOST_EVIDENCE_TEXT = 500
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
    phase = phase_of(root.frames, has_trained=iteration is not None)
    evidence = _evidence(rank_log, root)
    exits = {str(rank): one.how for rank, one in rank_log.ranks.items() if one.how}
    facts, row = facts_of(root), root.signature
    headline = _headline(rank_log, root, phase, iteration)
    record = RecordedDiagnosis(
        family=row.family,
        transient=row.is_transient,
        root_rank=root.ranks[0] if root.ranks else None,
        signature=row.id,
        evidence=evidence,
        headline=headline,
        text=_paragraph(headline, rank_log, root, facts),
        reason=_reason(row),
        policy=row.policy.value,
        advice=row.advice,
        source=row.source,
        next=_command(row, evidence, facts, rank_log),
        again=rank_log.unit.known.command,
        root_ranks=root.ranks,
        is_every_rank=root.is_all,
        world_size=rank_log.world_size,
        exits=exits,
        iteration=None if iteration is None else iteration[0],
        last_iteration=None if iteration is None else iteration[1],
        phase=phase,
        facts=facts,
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


def _headline(
    rank_log: RankLog, root: Root, phase: str | None, iteration: tuple[int, int | None] | None
) -> str:
    """Return who did what, where and when."""
    where = f"{root.where or root.frame or ''}{f', in {phase}' if phase else ''}"
    line = make_headline(
        _who(rank_log, root), root.what, where=where, when=_when(rank_log, iteration)
    )
    return f"{line}; {root.then}" if root.then else line


def _paragraph(headline: str, rank_log: RankLog, root: Root, facts: Mapping[str, str]) -> str:
    """Return the headline, what it means, and what the others did."""
    also = (f"{text[0].upper()}{text[1:]}" for text in (headline, *root.also))
    sentences = [f"{text.rstrip('.')}." for text in also]
    if "tried_to_allocate" in facts:
        sentences.append(_say_memory(facts))
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


def _say_memory(facts: Mapping[str, str]) -> str:
    """Describe the sizes of memory that a message tells."""
    parts = {
        "tried_to_allocate": "It tried to allocate {}",
        "free": ", {} were free",
        "total": " of {}",
        "gpu": " on GPU {}",
        "other_processes": "; other processes hold memory too: {}",
    }
    return "".join(text.format(facts[name]) for name, text in parts.items() if name in facts) + "."


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


def _command(
    signature: Signature,
    evidence: Sequence[RecordedEvidence],
    facts: Mapping[str, str],
    rank_log: RankLog,
) -> str | None:
    """Return what to type next: the signature's command, or what shows the evidence."""
    words: dict[str, str] = {}
    if evidence:
        words |= {"file": shlex.quote(evidence[0].file), "line": str(evidence[0].line)}
    if "path" in facts:
        words["directory"] = shlex.quote(str(Path(facts["path"]).parent))
    if "port" in facts:
        words["port"] = facts["port"]
    for template in (signature.command, "less +{line} {file}"):
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

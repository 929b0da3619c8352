"""Read what surrounds the text of a log line: rank, time, colours, prefixes.

Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from pytest_megatron.base.text import without_colours

# What stands before a line; of others `unwrap` takes off what it learns.
_PREFIX = re.compile(
    r"\ufeff|\[?(?P<stamp>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:\d\d))\]?(?: |$)"
    r"|\[rank(?P<rank>\d+)\]: ?|\[default(?P<local>\d+)\]: ?"  # torch
    r"|\[node(?:s|\d+)\]: ?"  # our own launcher for several nodes
)
# `Rank 3]` as torch's C++ writes it: [PG ID 0 PG GUID 0(default_pg) Rank 3]
_SPOKEN = re.compile(r"^\[(?:[EWIF]\d{3,4} .*?\bRank (\d+)\]|(?i:rank)[ _](\d+)\] )")
_GLOG = re.compile(r"\[?[EWIF](\d\d)(\d\d) (\d\d):(\d\d):(\d\d)(?:\.(\d+))?")
_ISO = re.compile(r"\b\d{4}-(\d\d)-(\d\d)[T_ ](\d\d):(\d\d):(\d\d)(?:[.,](\d+))?")
_SYSLOG = re.compile(
    r"^(?:[A-Z][a-z]{2} +\d+ \d\d:\d\d:\d\d|\d{4}-\d\d-\d\dT\S+ [\w.-]+ [\w./@-]+\[\d+\]:) "
)
_ITERATION = re.compile(r"\biteration[:\s]+(\d+)\s*/\s*(\d+)", re.IGNORECASE)
_ANY_YEAR = 2000  # glog has none; only differences count

# Lines that come after the end of a training and say nothing: of the interpreter, torch, the agent,
# and the commands that a shell prints under `set -x`.
_NOISE = re.compile(
    r"^\s|^$|^\++ \S|^\[?[WEI]\d{4} |[Ww]arning\b|^Exception ignored in|^sys:1:"
    r"|resource_tracker|leaked |\bNCCL (?:INFO|WARN|version)"
    r"|^wandb: |^frame #|^terminate called|^Fatal Python error"
    r"|^Extension modules|^(?:Current thread|Thread) 0x|destroy_process_group|\(core dumped\)$"
    r"|^(?:srun|slurmstepd|mpirun)\b|^[=\-*~]{4,}$|^(?:Root Cause|Failures?)\b|^\[\d+\]:$"
    r"|^Traceback |^(?:During handling|The above exception)|^Aborted|^Terminated|^Killed"
    r"|core dumped|^[\w.]+(?:Error|Exception|Interrupt|Exit)\b|torch/distributed/(?:run|elastic)"
    r"|^(?:For debugging consider|Compile with|CUDA kernel errors|Search for)|FAILED$|^<NO_OTHER"
)
# What programs, tests and runners write when all of it went well.
_SUCCESS = re.compile(
    r"^(?:=+ )?(?:\d+ (?!failed|error)\w+, )*\d+ passed(?:, \d+ (?!failed|error)\w+)* in [\d.]+s"
    r"|^OK(?: \(skipped=\d+\))?$|^\[after training is done\]|^exiting program at iteration \d"
    r"|'train_runtime':|^`Trainer\.fit` stopped: `max_(?:epochs|steps)=\d+` reached|^Job succeeded$"
    r"|(?:^|\bINFO\b[\]: |-]+)(?:Training|training|Finetuning|Pretraining) (?:is )?"
    r"(?:complete|completed|done|finished)\b"
)
# What shells, build tools, runners and programs write where something failed.
_TROUBLE = re.compile(
    r"(?i)\b(?:fail(?:s|ed|ures?)?|aborted|killed|oomkilled|crashed|fatal|panic|cancell?ed"
    r"|timed out|non-?zero|no space left|permission denied|core dumped|dumped core|bus error"
    r"|segmentation fault|illegal instruction|floating point exception|sig[a-z]{3,4} received)\b"
    r"|^\W*terminate(?:d\W*$|d by| called)|\bsending signal\b|\berr!|\b[1-9]\d* errors?\b"
    r"|^(?:\W*|\S+: )(?:error|critical)\b(?:\W*$|\s*[^\w\s])|^\S+: \*\*\* "
    r"|\bexit(?:ed)?\b[^\d\n]{0,20}[ :=-][1-9]\d*\b|\breturn(?:ed)? code\W+[1-9]"
)
# Counts none, helped itself, or warns; as torch does of connections that its own end closed.
_HARMLESS = re.compile(
    r"(?i)^\s|^\[?[IW]\d{3,4} |warn|\bignor|\bretr(?:y|ied)|\bif\b|\bsuccess|\brecover|NCCL INFO"
    r"|(?<![\d.])\b(?:no|not|never|without|zero|0)\s+(?:\w+\s+){0,2}(?:fail|error|abort|cancel)|\bnon-?fatal"
    r"|\b(?:fail\w*|errors?)\b(?: \w+)?[\"']?\s*[:=]\s*(?:0\b|\d+\.\d|\[\]|false|none|null)"
)
# What begins something that must end as well, and how far it is.
_BEGIN = re.compile(
    r"^=+ test session starts =+$|^\[before the start of training step\]"
    r"|^\++ .*\b(?:torchrun|torch\.distributed\.(?:run|launch)|accelerate|deepspeed|mpirun|pytest"
    r"|srun)\b"
)
_FAR = re.compile(
    r"(?i)\b(?:iteration|iter|step|epoch)\b[:\s\[]*(\d+)\s*/\s*(\d+)|\d%\|[^|]*\| *(\d+)/(\d+) \["
)


@dataclass(frozen=True, slots=True)
class Line:
    """A line without what was put in front of it.

    Attributes:
        rank: Whose line it is, None where it names none.
        time_s: When it was written: seconds by a clock that is the same within one log, or None.
        offset: Of its first byte in the log.
    """

    text: str
    rank: int | None
    time_s: float | None
    offset: int = 0


def parse_line(raw: str, offset: int = 0) -> Line:
    """Split a line of a log into what its writer put before it, and its text.

    Args:
        raw: As it is in the file, without its newline.
        offset: Where it begins in the file.
    """
    text = without_colours(raw).rstrip("\r\n")
    rank: int | None = None
    time_s: float | None = None
    while (found := _PREFIX.match(text)) is not None:
        text = text[found.end() :]
        match found.lastgroup:
            case None:
                pass
            case "stamp":
                time_s = parse_time(found["stamp"]) if time_s is None else time_s
            case "local":  # counts on its node only
                rank = int(found["local"]) if rank is None else rank
            case name:
                rank = int(found[name])
    if rank is None and (spoken := _SPOKEN.match(text)) is not None:
        rank = int(spoken[1] or spoken[2])
    time_s = parse_time(text) if time_s is None else time_s
    return Line(text=text, rank=rank, time_s=time_s, offset=offset)


def parse_time(text: str) -> float | None:
    """Return the first time that a line names, in seconds; None without one.

    Understood: ISO dates, `2026-11-21_09:00:00` of torch's agent, and glog's `E1121 09:00:00.1`.
    """
    head = text[:160]
    found = _GLOG.match(head) or _ISO.search(head)
    if found is None:
        return None
    *date, part = found.groups()
    month, day, hour, minute, second = map(int, date)
    try:
        moment = datetime(_ANY_YEAR, month, day, hour, minute, second, tzinfo=UTC)
    except ValueError:  # 30 February, 61 seconds
        return None
    return moment.timestamp() + (float(f"0.{part}") if part else 0.0)


def parse_iteration(text: str) -> tuple[int, int] | None:
    """Return N and M of a training's `iteration N/ M |`, None for every other line."""
    found = _ITERATION.search(text)
    return None if found is None else (int(found[1]), int(found[2]))


def is_noise(text: str) -> bool:
    """Return true if a line may follow the end of a training that did not go on."""
    return _NOISE.search(text) is not None or _SYSLOG.match(text) is not None


def says_success(text: str) -> bool:
    """Return true if a line shows that what wrote the log came to a good end.

    The last iteration of a training does, and what tests and runners write at theirs. Nothing else:
    a log that merely stops is no success.
    """
    found = parse_iteration(text)
    return (found is not None and found[0] == found[1]) or _SUCCESS.search(text) is not None


def parse_progress(text: str) -> tuple[int, int] | None:
    """Return N and M of whatever goes on in M steps, None for every other line."""
    found = _FAR.search(text)
    return None if found is None else (int(found[1] or found[3]), int(found[2] or found[4]))


def says_trouble(text: str) -> bool:
    """Return true if a good end before this line is none: something failed, or began."""
    if _BEGIN.search(text) is not None:
        return True
    return _TROUBLE.search(text) is not None and _HARMLESS.search(text) is None


def last_iteration(texts: Iterable[str]) -> tuple[int, int] | None:
    """Return the furthest iteration in lines, as `(N, M)`."""
    return max((found for text in texts if (found := parse_iteration(text))), default=None)

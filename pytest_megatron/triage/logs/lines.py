"""Read what surrounds the text of a log line: rank, time, colours, prefixes.

Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

# Colours, titles of windows; and NUL, which torch's handler of signals writes.
_UNSEEN = re.compile(
    r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[()][0-9A-Z]|[=>78M])|\0"
)
# What GitHub, GitLab, Jenkins, and Docker with --timestamps, put before each line. `gh run view`
# puts job and step before that.
_STAMPED = re.compile(
    r"^(?:[^\t\n]*\t[^\t\n]*\t)?\ufeff?\[?(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z)\]? "
    r"(?:\d\d[OE][ +] ?)?"
)
# What launchers and builders put there: a clock, a date (a line of syslog goes on with its host and
# program), a worker of Ray, a service of compose, a stream of mpirun, seconds of buildkit.
_PREFIXED = re.compile(
    r"^(?:\d\d:\d\d:\d\d(?:\.\d+)? |[A-Z][a-z]{2} \d\d \d\d:\d\d:\d\d (?!\S+ \S+?(?:\[\d+\])?: )"
    r"|\([\w.:-]+ pid=\d+(?:, ip=[\w.:]+)?\) |[\w.-]+-\d+ +\| "
    r"|\[\d+,(?P<rank>\d+)\]<std(?:err|out)>: ?"
    r"|(?:#\d+ )?\d{1,4}\.\d{2,3} (?=\D)|\[\d+\] (?=\[rank\d+\]:)| *\d+: (?=\[rank\d+\]:))"
)
_TAGGED = re.compile(r"^\[(?P<tag>rank|default)(?P<rank>\d+)\]: ?")
_OF_NODE = re.compile(r"^\[node(?:s|\d+)\]: ?")  # of a launcher for several nodes
_LABELLED = re.compile(r"^ *(?P<rank>\d+): ?")
# `Rank 3]` as torch's C++ writes it: [PG ID 0 PG GUID 0(default_pg) Rank 3]
_SPOKEN = re.compile(r"^\[(?:[EWIF]\d{3,4} .*?\bRank (\d+)\]|(?i:rank)[ _](\d+)\] )")
_GLOG = re.compile(r"\[?[EWIF](\d\d)(\d\d) (\d\d):(\d\d):(\d\d)(?:\.(\d+))?")
_ISO = re.compile(r"\b\d{4}-(\d\d)-(\d\d)[T_ ](\d\d):(\d\d):(\d\d)(?:[.,](\d+))?")
_SYSLOG = re.compile(r"^[A-Z][a-z]{2} +\d+ \d\d:\d\d:\d\d ")
_ITERATION = re.compile(r"\biteration[:\s]+(\d+)\s*/\s*(\d+)", re.IGNORECASE)
_ANY_YEAR = 2000  # glog has none; only differences count

# Lines that come after the end of a training and say nothing: of the interpreter, torch, the agent.
_NOISE = re.compile(
    r"^\s|^$|^\[?[WEI]\d{4} |[Ww]arning\b|^Exception ignored in|^sys:1:|resource_tracker|leaked "
    r"|\bNCCL (?:INFO|WARN|version)|^wandb: |^frame #|^terminate called|^Fatal Python error"
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
    r"|^(?:Training|training|Finetuning|Pretraining) (?:is )?(?:complete|completed|done|finished)\b"
)


@dataclass(frozen=True, slots=True)
class Line:
    """A line without what was put in front of it.

    Attributes:
        rank: Whose line it is, None where it names none.
        time_s: When it was written: seconds by a clock that is the same within one log, or None.
    """

    text: str
    rank: int | None
    time_s: float | None


def parse_line(raw: str, *, is_labelled: bool = False) -> Line:
    """Take a line apart.

    Args:
        raw: As it is in the file, without its newline.
        is_labelled: Lines of this file begin with `3: `, as of `srun --label`.
    """
    text = _UNSEEN.sub("", raw).rstrip("\r\n")
    rank: int | None = None
    time_s: float | None = None
    if (stamp := _STAMPED.match(text)) is not None:
        time_s = parse_time(stamp[1])
        text = text[stamp.end() :]
    if (prefix := _PREFIXED.match(text)) is not None:
        rank = None if prefix["rank"] is None else int(prefix["rank"])
        text = text[prefix.end() :]
    if is_labelled and (label := _LABELLED.match(text)) is not None:
        rank = int(label["rank"])
        text = text[label.end() :]
    if (node := _OF_NODE.match(text)) is not None:
        text = text[node.end() :]
    while (tag := _TAGGED.match(text)) is not None:
        if rank is None or tag["tag"] == "rank":  # [default3] counts on its node only
            rank = int(tag["rank"])
        text = text[tag.end() :]
    if rank is None and (spoken := _SPOKEN.match(text)) is not None:
        rank = int(spoken[1] or spoken[2])
    return Line(text=text, rank=rank, time_s=parse_time(text) if time_s is None else time_s)


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


def is_labelled(lines: Iterable[str]) -> bool:
    """Return true if the lines of a log begin with `3: `, as of `srun --label`."""
    texts = [line for line in lines if line.strip()]
    with_label = [match for text in texts if (match := _LABELLED.match(text))]
    return len(texts) > 1 and len(with_label) >= 0.8 * len(texts) and len(with_label) > 1


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


def last_iteration(texts: Iterable[str]) -> tuple[int, int] | None:
    """Return the furthest iteration in lines, as `(N, M)`."""
    return max((found for text in texts if (found := parse_iteration(text))), default=None)

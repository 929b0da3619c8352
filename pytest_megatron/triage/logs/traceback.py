"""Python tracebacks in logs: where they end, what they raised, and whether that ended the rank.

Pure: works on the lines behind the header of a traceback.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from pytest_megatron.triage.logs.lines import Line, is_noise, parse_iteration, says_success

HEADER = "Traceback (most recent call last)"
_FRAME = re.compile(r'^(?: +|> )File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<name>.+)$')
_RAISED = re.compile(r"^[A-Za-z_][\w.]*(?:: |:$|$)")
_EXCEPTION = re.compile(
    r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Warning|Failure|Timeout|gaierror)"
    r"\b(?:: .*)?$|^socket\.\w+: |^Exception: "
)
_QUALIFIED = re.compile(r"^(?:[a-z_]\w*\.)+[A-Z]\w*(?:: .*)?$")  # where names of modules precede it
_OF_PYTEST = re.compile(r"^(?:E +|(?:FAILED|ERROR) \S+(?: \S+)* - )(?=[A-Za-z_])")
_ALARM = re.compile(
    r"^(?:\S+: )?(?:ERROR|FATAL|CRITICAL|Check failed|THCudaCheck FAIL|error:|fatal:)"
    r"|^(?:\S+: )?(?:CUDA|NCCL) [Ee]rror|[\[| -](?:ERROR|CRITICAL|FATAL)[\]| :]"
)
_TRIED_AGAIN = re.compile(r"(?i)\b(?:re-?try(?:ing)?|attempt \d+|ignor(?:ed|ing)|handled|caught)\b")
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen ", "<string>")
_DIRECT = "The above exception was the direct cause of the following exception:"
_DURING = "During handling of the above exception, another exception occurred:"
_NOT_FATAL = re.compile(
    r"^Exception ignored in|^Error in atexit|^--- Logging error|^Exception in thread"
)
# Of the thread that feeds a queue and the process that counts semaphores, which outlive a program.
_OF_HELPER = re.compile(
    r'multiprocessing/(?:resource_tracker|queues)\.py", line \d+, in (?:main|_feed)$'
)
# In front of the traceback of a worker of Ray, which is what was raised.
_REMOTE = re.compile(r"^(?:ray\.exceptions\.)?RayTaskError\b.*: ray::")
# What a runner writes when the step that it ran had failed; further steps follow.
_OF_RUNNER = re.compile(
    r"^##\[error\]Process completed with exit code|Error: The command exited with status [1-9]"
    r"|^ERROR: Job failed"
)
_OF_SCHEDULER = ("srun: ", "slurmstepd: ")  # how it ended tasks, nothing that a program says
_CODE = "   "  # in front of the code of a frame, and not of an exception
# What stands before the lines of a group of exceptions, and the rules between them.
_MARGIN = re.compile(r" *(?:[|+] )?")
_IN_GROUP = re.compile(r" +[|+]")
_RULE = re.compile(r" +\+-")
_MOST_MESSAGE_LINES = 12
MOST_LINES_AFTER = 7  # that may follow what ended a rank; of its message too
_MOST_SAID = 60  # lines from the end of a log that are looked at where no traceback is whole


class ExceptionLink(Enum):
    """Link of an exception to the one before it."""

    NONE = "none"
    DIRECT = "direct"  # raise ... from
    DURING = "during"  # raised in an except block
    PART = "part"  # beside it in a group


@dataclass(frozen=True, slots=True, kw_only=True)
class RaisedException:
    """One exception of a traceback.

    Attributes:
        message: `Type: text`, with the lines that belong to it.
        frames: `file:line in name`, outermost first.
        own_frame: The deepest outside of libraries, or None.
        time_s: Time of the last line with a time before it, or None.
        link: To the exception before it in the same log.
        said: Index of the line with its type.
        end: Index behind its last line.
    """

    message: str
    frames: tuple[str, ...]
    own_frame: str | None
    time_s: float | None
    link: ExceptionLink
    said: int
    end: int

    @property
    def headline(self) -> str:
        """The first line of its message."""
        return self.message.partition("\n")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Exceptions of one traceback, the last raised one last."""

    links: tuple[RaisedException, ...]
    is_ignored: bool = False

    @property
    def last(self) -> RaisedException:
        """Exception that ended the traceback."""
        return self.links[-1]


def read_chain(lines: Sequence[Line], start: int) -> Chain | None:
    """Read the traceback whose header is `lines[start]`, up to the end of its chain.

    Args:
        lines: Lines of one rank, without those of others between them.
        start: Index of a line that holds `HEADER`.
    """
    before = lines[start - 1].text if start else ""
    first = lines[start + 1].text if start + 1 < len(lines) else ""
    links: list[RaisedException] = []
    link = ExceptionLink.NONE
    while (raised := _read_one(lines, start, link)) is not None:
        links += [raised, *_parts(lines, raised.end)]
        at = _skip_blank(lines, links[-1].end)
        text = lines[at].text.strip() if at < len(lines) else ""
        if not text.startswith((_DIRECT, _DURING)):
            break
        link = ExceptionLink.DIRECT if text.startswith(_DIRECT) else ExceptionLink.DURING
        start = _skip_blank(lines, at + 1)
        if start >= len(lines) or HEADER not in lines[start].text:
            break
    if not links:
        return None
    return Chain(links=tuple(links), is_ignored=is_ignored(before, first))


def is_ignored(above: str, below: str) -> bool:
    """Return true if the traceback between two lines ended nothing: of a thread, at the exit."""
    return _NOT_FATAL.search(above) is not None or _OF_HELPER.search(below) is not None


def _parts(lines: Sequence[Line], start: int) -> Iterator[RaisedException]:
    """Yield the exceptions of a group, which stand behind a margin after its message."""
    index = last = start
    while index < len(lines) and index - last < _MOST_MESSAGE_LINES:
        text = lines[index].text
        begins = _IN_GROUP.match(text) and (HEADER in text or _RULE.match(text))
        part = _read_one(lines, index, ExceptionLink.PART) if begins else None
        if part is not None:
            yield part
        index = index + 1 if part is None else part.end
        last = index if _IN_GROUP.match(text) else last  # not all lines of a message have a margin


def is_continued(lines: Sequence[Line], start: int) -> bool:
    """Return true if the traceback whose header is `lines[start]` goes on from one before it."""
    if _IN_GROUP.match(lines[start].text) and "+" not in lines[start].text:
        return True
    before = (line.text.strip() for line in reversed(lines[max(0, start - 3) : start]))
    said = next((text for text in before if text), "")
    return said.startswith((_DIRECT, _DURING))


def is_at_end(lines: Sequence[Line], said: int) -> bool:
    """Return true if nothing worth mentioning follows the line `said`: the rank ended there.

    A training that goes on prints iterations; one that ends prints what `is_noise` knows.
    """
    num_after = lines_after(lines, said)
    return num_after is not None and num_after <= MOST_LINES_AFTER


def lines_after(lines: Sequence[Line], said: int) -> int | None:
    """Return how many lines that mean something follow, None where what wrote them went on."""
    after = [line.text for line in lines[said + 1 :]]
    if any(parse_iteration(text) is not None or says_success(text) for text in after):
        return None
    of_program = itertools.takewhile(lambda text: _OF_RUNNER.search(text) is None, after)
    return sum(not is_noise(text) for text in of_program)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bare:
    """Return the error in a line near the end of a log, where no traceback is whole.

    Attributes:
        index: Number of the line.
        message: `Type: text`, with the lines that belong to it.
        is_exception: Whether it has the form of an exception, and is no line of a logger.
        num_after: Lines behind it that mean something.
    """

    index: int
    message: str
    is_exception: bool
    num_after: int


def bare_errors(lines: Sequence[Line]) -> Iterator[Bare]:
    """Yield the errors at the end of a log without a traceback, last one first.

    Stops where the program still went on. What follows a runner's word on it is of other programs.
    """
    num_after = num_said = 0
    for index in range(len(lines) - 1, -1, -1):
        text = lines[index].text.strip()
        if not text:
            continue
        if _OF_RUNNER.search(text) is not None:
            num_after = num_said = 0
        if parse_iteration(text) is not None or says_success(text) or num_said >= _MOST_SAID:
            return
        num_said += 1
        said = _OF_PYTEST.sub("", text)
        is_exception = any(p.match(said) is not None for p in (_EXCEPTION, _QUALIFIED))
        if is_exception and _has_whole_traceback(lines, index):
            is_exception = False  # it was looked at, and did not end anything
        is_alarm = _ALARM.search(text) is not None or _OF_PYTEST.match(text) is not None
        is_alarm &= not text.startswith(_OF_SCHEDULER)
        if (is_exception or is_alarm) and _TRIED_AGAIN.search(text) is None:
            end = _end_of_message(lines, index)
            message = "\n".join([said, *(line.text for line in lines[index + 1 : end])])
            yield Bare(index=index, message=message, is_exception=is_exception, num_after=num_after)
        num_after += not is_noise(lines[index].text)


def is_of_exception(line: str, above: Sequence[str], is_own: Callable[[str], bool]) -> bool:
    """Return true if a line is code of a traceback, or in the message of an own mistake.

    Args:
        line: A line that no exception begins.
        above: What stands before it, of the same rank.
        is_own: Tells own mistakes.
    """
    for text in reversed(above):
        said = _OF_PYTEST.sub("", text.strip())
        if frame_of(text) is not None:
            return line.startswith(_CODE)
        if is_own(said):
            return True
        if _EXCEPTION.match(said) is not None or not _belongs(text):
            return False
    return False


def _has_whole_traceback(lines: Sequence[Line], said: int) -> bool:
    """Return true if a line with an exception ends a traceback whose header is of the same rank."""
    for line in reversed(lines[:said]):
        if HEADER in line.text:
            return line.rank == lines[said].rank
        if line.text.strip() and not line.text.startswith((" ", "\t")):
            return False
    return False


def frame_of(text: str) -> tuple[str, bool] | None:
    """Return `file:line in name` of a line of a stack, and whether it is a library's."""
    found = _FRAME.match(text)
    if found is None:
        return None
    name = found["file"].rpartition("/")[2]
    is_library = any(part in found["file"] for part in _LIBRARIES)
    return f"{name}:{found['line']} in {found['name']}", is_library


def innermost(frames: Sequence[tuple[str, bool]]) -> str | None:
    """Return the deepest frame outside of libraries, else the deepest; None without any.

    Args:
        frames: Results of `frame_of`, the deepest first, as faulthandler prints them.
    """
    own = (text for text, is_library in frames if not is_library)
    return next(own, frames[0][0] if frames else None)


def _read_one(lines: Sequence[Line], start: int, link: ExceptionLink) -> RaisedException | None:
    """Read one traceback of a chain."""
    frames: list[str] = []
    own: str | None = None
    index = start + 1
    # To the right in a message of another exception, and behind a margin in a group.
    is_rule = _RULE.match(lines[start].text) is not None
    margin = _MARGIN.match(lines[min(start + is_rule, len(lines) - 1)].text)
    indent = 0 if margin is None else margin.end()
    while index < len(lines):
        text = _behind(lines[index].text, indent)
        if text and not text.startswith((" ", "\t", "> File")) and not _REMOTE.match(text):
            break
        if (frame := frame_of(text)) is not None:
            frames.append(frame[0])
            own = own if frame[1] else frame[0]
        index += 1
    if index >= len(lines) or not _RAISED.match(lines[index].text[indent:]):
        return None
    said = index
    end = _end_of_message(lines, index, indent)
    message = [lines[index].text[indent:], *(line.text for line in lines[index + 1 : end])]
    return RaisedException(
        message="\n".join(message),
        frames=tuple(frames),
        own_frame=own or (frames[-1] if frames else None),
        time_s=_time_before(lines, end),
        link=link,
        said=said,
        end=end,
    )


def _end_of_message(lines: Sequence[Line], said: int, indent: int = 0) -> int:
    """Return the index behind the last line of what the line `said` begins to say."""
    is_in_group = _IN_GROUP.match(lines[said].text) is not None
    most = min(len(lines), said + _MOST_MESSAGE_LINES)
    end = said + 1
    while end < most and _belongs(_behind(lines[end].text, indent * is_in_group)):
        end += 1
    return end


def _behind(text: str, indent: int) -> str:
    """Return a line without its margin, nothing if it does not begin with one."""
    return "" if text[:indent].strip(" |+") else text[indent:]


def _belongs(text: str) -> bool:
    """Return true if a line behind an exception's first is part of its message."""
    stops = (
        HEADER,
        _DIRECT,
        _DURING,
        "Original Traceback",
        "Exception ignored in",
        "terminate ",
        "Fatal Python error: ",
        *_OF_SCHEDULER,
        "##[",
    )
    if not text.strip() or any(stop in text for stop in stops):
        return False
    if parse_iteration(text) is not None:
        return False
    return re.match(r"\[?[EWIF]\d{4} |.*NCCL (?:INFO|WARN)|\[?\d{4}-\d\d-\d\d", text) is None


def _skip_blank(lines: Sequence[Line], index: int) -> int:
    """Return the number of the next line with text."""
    while index < len(lines) and not lines[index].text.strip():
        index += 1
    return index


def _time_before(lines: Sequence[Line], end: int) -> float | None:
    times = (line.time_s for line in reversed(lines[max(0, end - 400) : end]))
    return next((time for time in times if time is not None), None)

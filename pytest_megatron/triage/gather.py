"""Read the logs of one launch, and collect events, exceptions and ends by rank.

Every file is read once in pieces for the texts that matter; then only the lines around those.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pytest_megatron.errors import TriageError
from pytest_megatron.triage.logs.exits import LITERALS as EXIT_LITERALS
from pytest_megatron.triage.logs.exits import (
    NEAR_BYTES,
    ProcessExit,
    excuse,
    merge_exits,
    read_exits,
    spawned_rank,
    stubborn_pid,
    unnamed_signal,
)
from pytest_megatron.triage.logs.fatal import (
    NEEDED,
    classify_message,
    find_bare,
    find_fatal,
    read_error_file,
)
from pytest_megatron.triage.logs.lines import (
    Line,
    is_noise,
    last_iteration,
    parse_iteration,
    parse_line,
    parse_progress,
    says_success,
    says_trouble,
)
from pytest_megatron.triage.logs.scan import (
    RawLine,
    Scanner,
    lines_at,
    read_from,
    read_lines,
)
from pytest_megatron.triage.logs.traceback import (
    HEADER,
    frame_of,
    innermost,
    is_ignored,
    is_of_exception,
)
from pytest_megatron.triage.rank_log import (
    Enqueued,
    Event,
    Fatal,
    Known,
    LogFile,
    LogLine,
    RankLog,
    RankStory,
    Stream,
    Unit,
)
from pytest_megatron.triage.signatures import (
    LineRole,
    Signature,
    Table,
    is_own_mistake,
    is_quoted,
    match_line,
)

_WHAT = "  what():  "  # what an exception of C++ says when it ends a process
_WATCHDOG = "Watchdog caught collective operation timeout"
_ENQUEUED = "ast enqueued"
_STACK = "most recent call first"
_OTHER_THREAD = "Thread 0x"  # that of the current one begins with "Current thread"
_LOADER_WORKER = " in _worker_loop"  # of torch.utils.data, which prints to the stderr of its rank
_OWN = (HEADER, _WHAT, _ENQUEUED, _STACK, *EXIT_LITERALS, *NEEDED)
_TAIL_BYTES = 1 << 16
_BEFORE_BYTES = 1 << 13  # before a line that an exception may quote
_STACK_BYTES = 1 << 15
_MOST_OVERCOME_BYTES = 1 << 14  # from a pull that broke off to the word that its step failed
_LAST_WORDS = 8
_SAID = "exit_code"  # what a program that ended so may have said in a line
_NEARLY_LAST = 1  # lines after the exception of a rank that has a log of its own
_MOST_EVENTS = 400  # of one log; a flood says no more than its beginning

_WORK = re.compile(r"WorkNCCL\(SeqNum=(\d+), OpType=(\w+), NumelIn=(\d+)")
_GROUP = re.compile(r"\[PG (?:ID \d+ )?PG GUID (\S+) Rank|\[PG (\d+)")
_NCCL = re.compile(r"[\w.-]+:\d+:")  # host and process in front of a line of NCCL
_LAST = re.compile(r"[Ll]ast enqueued (?:NCCL )?work: (\d+)")
_AT_WORK = re.compile(r"(?:watchdog at work|Timeout at NCCL work)(?: sequence id)?: (\d+)")
_CUDA_FAILURE = re.compile(r"NCCL WARN .*\bCuda failure (?:\d+ )?'([^']+)'")
_OF_NCCL = ("exit", "nccl_system", "network", "unknown")  # what follows from a failure of CUDA


@dataclass(slots=True)
class _LogCollector:
    """Events collected for one rank, or the launcher.

    Attributes:
        exits: Ends of ranks as a launcher logs them; `stubborn`: processes that had to be killed.
        spawned: Ranks that a launcher says it started.
        signals: Those that ended a rank, of which the launcher does not say which.
    """

    events: list[Event] = field(default_factory=list)
    traces: list[tuple[LogFile, int]] = field(default_factory=list)  # offsets of headers
    what: list[Fatal] = field(default_factory=list)
    enqueued: list[Enqueued] = field(default_factory=list)
    stacks: list[tuple[LogFile, int]] = field(default_factory=list)
    exits: list[tuple[ProcessExit, LogLine]] = field(default_factory=list)
    stubborn: set[int | None] = field(default_factory=set)
    spawned: set[int | None] = field(default_factory=set)
    signals: list[tuple[str, LogLine]] = field(default_factory=list)


def make_scanner(table: Table) -> Scanner:
    """Return what finds every text that a table, and this module, look for."""
    return Scanner([*_OWN, *(text for row in table.lines for text in row.literals)])


def gather(unit: Unit, table: Table, scanner: Scanner) -> RankLog:
    """Read all logs of a launch. A file that cannot be read is noted."""
    books: defaultdict[int | None, _LogCollector] = defaultdict(_LogCollector)
    launcher_book = books[None]
    notes = list(unit.notes)
    for log in unit.logs:
        try:
            _read_log(log, table, scanner, books)
        except OSError as error:
            notes.append(f"{log.shown}: {error.strerror}")
    exits = [(excuse(end, launcher_book.stubborn), place) for end, place in launcher_book.exits]
    exits += _ends_without_rank(books)
    ends = merge_exits([end for end, _ in exits])
    shown = dict(exits)
    successes = _successes(unit.logs)
    last = (line.text for log in unit.logs for line in _tail(log))
    iteration = unit.known.iteration or last_iteration(last)
    good = _good_ends(successes, books)
    _forget_what_was_overcome(books, successes, unit.known, has_trained=iteration is not None)
    known_ranks = {rank for rank in books if rank is not None} | ends.keys() | set(unit.ranks)
    own = _fatal(books[None], None, table, None, is_clean=False)
    is_clean = _is_presumed_clean(unit, ends, own)
    heir = _heir(books, ends)
    ranks: dict[int, RankStory] = {}
    for rank in sorted(known_ranks):
        by_file = _by_file(unit.error_files.get(rank), table, notes)
        fatal = _fatal(books[rank], ends.get(rank), table, rank, is_clean=is_clean)
        logs = [log for log in unit.logs if log.rank == rank]
        is_well = is_clean or any(log in good for log in logs)
        if fatal is None and by_file is None and not is_well:
            fatal = _bare(logs, ends.get(rank), table, rank, most_after=_NEARLY_LAST)
        if fatal is None and by_file is None and rank == heir:
            logs = [log for log in unit.logs if log.rank is None]
            fatal = own if _is_of_program(own) else _bare(logs, ends.get(rank), table)
            traces = books[None].traces
            if not _is_of_program(fatal):
                lone = find_fatal(traces, table, None, ends[rank], is_lone=True)
                is_line = fatal is not None and fatal.signature.id == _SAID
                fatal = fatal if lone is None and is_line else lone
            if fatal is None and ends[rank].how == "SIGABRT":
                fatal = next(reversed(books[None].what), None)
        ranks[rank] = _story(rank, books[rank], ends.get(rank), _joined(by_file, fatal), unit)
        if rank in ends:
            ranks[rank] = replace(ranks[rank], exit_place=shown[ends[rank]])
    alone = is_clean if not known_ranks else is_clean or bool(ends)
    launcher = None if alone else own
    if launcher is None and not alone:
        logs = [log for log in unit.logs if log.rank is None]
        launcher = _bare(logs, None, table)
    launcher = _of_nobody(launcher, ranks, books, unit)
    return RankLog(
        unit=unit,
        ranks=ranks,
        launcher=_story(None, books[None], None, launcher, unit),
        iteration=iteration,
        is_presumed_clean=is_clean,
        success=_good_end_of_all(unit.logs, successes, good),
        notes=tuple(notes),
    )


def _of_nobody(
    fatal: Fatal | None,
    ranks: dict[int, RankStory],
    books: Mapping[int | None, _LogCollector],
    unit: Unit,
) -> Fatal | None:
    """Return an error in a launcher's log that is no rank's; give others to the one they name."""
    if fatal is None or fatal.rank is None:
        return fatal
    story = ranks.get(fatal.rank) or _story(fatal.rank, books[fatal.rank], None, None, unit)
    if story.fatal is not None:
        return fatal
    ranks[fatal.rank] = replace(story, fatal=fatal)
    return None


def _ends_without_rank(
    books: Mapping[int | None, _LogCollector],
) -> list[tuple[ProcessExit, LogLine]]:
    """Return ends of which a launcher does not say the rank, where all ranks but one raised."""
    launcher = books[None]
    spawned = [rank for rank in launcher.spawned if rank is not None]
    silent = [rank for rank in spawned if rank not in books or not books[rank].traces]
    if len(silent) != 1:
        return []
    return [
        (ProcessExit(rank=silent[0], how=how, is_first=True, shown=place.text), place)
        for how, place in launcher.signals
    ]


def _by_file(path: Path | None, table: Table, notes: list[str]) -> Fatal | None:
    """Return the exception in torch's error file of a rank; an unreadable file is noted."""
    try:
        return read_error_file(path, table)
    except OSError as error:
        notes.append(f"{path}: {error.strerror}")
    except TriageError as error:
        notes.append(str(error))
    return None


def _heir(books: Mapping[int | None, _LogCollector], ends: dict[int, ProcessExit]) -> int | None:
    """Return the rank that an exception in a log of nobody's ended.

    In a log of a launcher whose ranks write to it without their names that is the one which it saw
    first, if nothing else explains why that one failed.
    """
    first = [rank for rank, end in ends.items() if end.is_first] or list(ends)[:1]
    rank = first[0] if len(first) == 1 or len(ends) == 1 else None
    if rank is None or books[rank].traces or ends[rank].how == "exit code 0":
        return None
    return rank if ends[rank].how.startswith(("exit code ", "SIGABRT")) else None


def _is_of_program(fatal: Fatal | None) -> bool:
    """Return true if an exception is one of the program, and not the launcher's about it."""
    if fatal is None or fatal.signature.role in (LineRole.OUTCOME, LineRole.CASCADE):
        return False
    if fatal.signature.id == _SAID:
        return False
    return not any(frame.startswith("run.py:") for frame in fatal.frames)


def _successes(logs: Sequence[LogFile]) -> dict[LogFile, LogLine]:
    """Return the last line of each log that shows a good end."""
    found = ((log, line) for log in logs for line in _tail(log) if says_success(line.text))
    return {log: _place(log, line) for log, line in found}


def _good_ends(
    successes: Mapping[LogFile, LogLine], books: Mapping[int | None, _LogCollector]
) -> dict[LogFile, LogLine]:
    """Return the good ends that hold: nothing bad follows, and no other tests failed before."""
    events = [event for book in books.values() for event in book.events]

    def is_good(end: LogLine) -> bool:
        """Return whether what wrote a log ended well."""
        is_of_tests = re.search(r" passed|^OK\b", end.text) is not None
        for event in events:
            row, place = event.signature, event.place
            is_bad = row.is_fatal or row.role in (LineRole.CAUSE, LineRole.OUTCOME)
            if place.log == end.log and (
                (is_bad and place.offset > end.offset) or (is_of_tests and row.id == "tests_failed")
            ):
                return False
        lines = _tail(end.log)
        far = last_iteration(line.text for line in lines if line.offset <= end.offset)
        behind = [line.text for line in lines if line.offset > end.offset]
        steps = [step for step in map(parse_progress, behind) if step not in (None, far)]
        return all(step[0] >= step[1] for step in steps[-1:]) and not any(
            says_trouble(text) or (HEADER in text and not is_ignored(above, below))
            for above, text, below in zip(["", *behind], behind, [*behind[1:], ""], strict=False)
        )

    return {log: end for log, end in successes.items() if is_good(end)}


def _good_end_of_all(
    logs: Sequence[LogFile],
    successes: Mapping[LogFile, LogLine],
    good: Mapping[LogFile, LogLine],
) -> LogLine | None:
    """Return a good end, None if there is none or a training in another log stops short of it.

    One is to go on where another iteration would be logged, unless the good end names the last one.
    """
    end = next(iter(good.values()), None)
    for log in logs if end is not None else ():
        found = (parse_iteration(line.text) for line in _tail(log))
        steps = [step for step in found if step is not None]
        if log in successes or not steps:
            continue
        last, most = steps[-1]
        before = max((n for n, m in steps if m == most and n < last), default=0)
        is_named = any(re.search(rf"\b{last}\b", line.text) for line in good.values())
        if 2 * last - before <= most and not is_named:
            return None
    return end


def _forget_what_was_overcome(
    books: Mapping[int | None, _LogCollector],
    successes: Mapping[LogFile, LogLine],
    known: Known,
    *,
    has_trained: bool,
) -> None:
    """Leave out lines of a launcher's log after which what wrote it came to a good end.

    And pulls and clones that broke off long before the step that needed them failed: another
    attempt helped. Of all logs, what ranks went on after.
    """
    logs = books[None]
    outcomes = [e for e in logs.events if e.signature.role is LineRole.OUTCOME]

    def is_overcome(event: Event) -> bool:
        """Return whether the program went on after a line."""
        row, place = event.signature, event.place
        if place.log in successes and place.offset <= successes[place.log].offset:
            return row.family != "nonfinite_loss"
        if not row.is_transient or row.family not in ("container", "network"):
            return False
        later = [e for e in outcomes if e.place.log == place.log and e.place.offset > place.offset]
        if has_trained or any(e.signature.id == "tests_failed" for e in later):
            return True
        end = min((e.place.offset for e in later), default=place.log.path.stat().st_size)
        return end - place.offset > _MOST_OVERCOME_BYTES

    logs.events = [event for event in logs.events if not is_overcome(event)]
    for book in books.values():
        book.events = [event for event in book.events if not _was_survived(event)]
        book.traces = [t for t in book.traces if t[0].short_name not in known.outlived]


def _was_survived(event: Event) -> bool:
    """Return true if a line that may explain what comes later does not: ranks went on after it.

    NCCL sets up its communicator without what it warned of. A training began behind the line, or
    came two iterations further: one more is printed of the one in which a rank failed.
    """
    row, place = event.signature, event.place
    if row.is_fatal or not row.explains:
        return False
    process = _NCCL.match(place.text)
    later: set[tuple[int, int]] = set()
    last = (line for line in _tail(place.log) if line.offset >= place.offset)
    for line in (*read_lines(place.log.path, place.offset, _TAIL_BYTES), *last):
        if (
            process is not None
            and "Init COMPLETE" in line.text
            and line.text.startswith(process[0])
        ):
            return True
        if (step := parse_iteration(line.text)) is not None:
            later.add(step)
        if len(later) > 1:
            return True
    if not later:
        return False
    first = max(0, place.offset - _TAIL_BYTES)
    before = read_lines(place.log.path, first, place.offset - first)
    return not any(parse_iteration(line.text) for line in before)


def _read_log(
    log: LogFile,
    table: Table,
    scanner: Scanner,
    books: defaultdict[int | None, _LogCollector],
) -> None:
    """Sort the lines of one log that hold a known text into the notebooks."""
    num_events = 0
    for raw in lines_at(log.path, scanner.find(log.path)):
        line = parse_line(raw.text)
        rank = line.rank if log.rank is None else log.rank
        book = books[rank]
        if HEADER in line.text:
            book.traces.append((log, raw.start))
            continue
        if _STACK in line.text and not line.text.startswith(_OTHER_THREAD):
            book.stacks.append((log, raw.start))
        place = LogLine(log=log, offset=raw.start, text=line.text)
        if log.rank is None and any(text in line.text for text in EXIT_LITERALS):
            books[None].exits += _exits_at(log, raw)
            books[None].stubborn.add(stubborn_pid(line.text))
            books[None].spawned.add(spawned_rank(line.text))
            if (how := unnamed_signal(line.text)) is not None:
                books[None].signals.append((how, place))
        if line.text.startswith(_WHAT):
            message = f"c10::Error: {line.text.removeprefix(_WHAT)}"
            signature = classify_message(table, message)
            book.what.append(
                Fatal(signature=signature, message=message, time_s=line.time_s, place=place)
            )
        if _ENQUEUED in line.text or _WATCHDOG in line.text:
            book.enqueued.append(_enqueued(line.text))
        if num_events < _MOST_EVENTS and (found := match_line(table, line.text)) is not None:
            signature, match = found
            signature = _of_cuda(table, signature, line.text)
            if signature.is_from_outside and (
                is_quoted(line.text, match.start()) or _is_of_exception(place, line.rank, signature)
            ):
                continue
            group = match.groupdict().get("rank")
            whose = int(group) if rank is None and group else rank
            books[whose].events.append(
                Event(signature=signature, rank=whose, time_s=line.time_s, place=place)
            )
            num_events += 1


def _is_of_exception(place: LogLine, rank: int | None, signature: Signature) -> bool:
    """Return true if a line is code of a traceback, or in the message of an own mistake.

    A message has no end that is to be seen: what stops everything is not taken for a part of one.
    """
    start = max(0, place.offset - _BEFORE_BYTES)
    above = read_lines(place.log.path, start, place.offset - start)[:-1]
    lines = [line.text for line in above if place.log.rank is not None or line.rank == rank]
    lines = lines if signature.is_transient else lines[-1:]
    return is_of_exception(place.text, lines, is_own_mistake)


def _of_cuda(table: Table, signature: Signature, text: str) -> Signature:
    """Return the row of the failure of CUDA that NCCL warns of; what it raises then is vaguer."""
    told = _CUDA_FAILURE.search(text) if signature.id == "nccl_warning" else None
    row = None if told is None else table.raised(f"RuntimeError: CUDA error: {told[1]}")
    if row is None or row.role is not LineRole.CAUSE or row.id == "exception":
        return signature
    return replace(row, explains=_OF_NCCL)


def _exits_at(log: LogFile, raw: RawLine) -> list[tuple[ProcessExit, LogLine]]:
    """Return the exits of ranks that a line of a launcher tells."""
    before, behind = NEAR_BYTES
    start = max(0, raw.start - before)
    data = read_from(log.path, start, raw.start - start + behind)
    around = data[: raw.start - start].decode(errors="replace")
    rest = data[raw.start - start :].decode(errors="replace")
    return [
        (end, LogLine(log=log, offset=raw.start + end.shift, text=end.shown))
        for end in read_exits(raw.text, around + rest, len(around))
    ]


def _enqueued(text: str) -> Enqueued:
    """Read the watchdog's report of the collective that did not finish."""
    work, last, group = _WORK.search(text), _LAST.search(text), _GROUP.search(text)
    at = work or _AT_WORK.search(text)
    return Enqueued(
        group="" if group is None else group[1] or group[2] or "",
        timed_out=None if at is None else int(at[1]),
        last=None if last is None else int(last[1]),
        op=None if work is None else work[2],
        num_elements=None if work is None else int(work[3]),
    )


def _is_presumed_clean(unit: Unit, ends: dict[int, ProcessExit], launcher: Fatal | None) -> bool:
    """Return true if nothing failed for the launcher, which would have logged it."""
    if unit.known.returncode is not None:
        return unit.known.returncode == 0
    if launcher is not None and any(f.startswith("run.py:") for f in launcher.frames):
        return False  # it was torch's agent itself that ended with an exception
    has_launcher = any(log.rank is None for log in unit.logs)
    return has_launcher and bool(unit.ranks) and not ends and not unit.error_files


def _fatal(
    logs: _LogCollector,
    process_exit: ProcessExit | None,
    table: Table,
    rank: int | None,
    *,
    is_clean: bool,
) -> Fatal | None:
    """Return the exception that ended a rank, if one did."""
    if is_clean or (process_exit is not None and process_exit.how == "exit code 0"):
        return None
    found = find_fatal(logs.traces, table, rank, process_exit)
    if found is None and process_exit is not None and process_exit.message is not None:
        found = Fatal(
            signature=classify_message(table, process_exit.message), message=process_exit.message
        )
    if found is not None:
        return found
    return logs.what[-1] if logs.what else None


def _bare(
    logs: Sequence[LogFile],
    process_exit: ProcessExit | None,
    table: Table,
    rank: int | None = None,
    *,
    most_after: int | None = None,
) -> Fatal | None:
    """Return the error at a log's end where its traceback is missing or cut off.

    Args:
        logs: The first with an error counts.
        process_exit: How the launcher saw it end, or None.
        table: Signatures of errors.
        rank: Whose lines count; None takes all.
        most_after: Lines that may follow; None takes what a person who reads the end would take.
    """
    if process_exit is not None and (
        process_exit.how == "exit code 0" or process_exit.how.startswith("SIG")
    ):
        return None
    for log in logs:
        found = find_bare(log, _tail(log), table, rank, most_after=most_after)
        is_line = found is not None and found.signature.id == _SAID  # no matter, if nothing failed
        if found is not None and not (is_line and process_exit is None):
            return found
    return None


def _joined(filed: Fatal | None, logged: Fatal | None) -> Fatal | None:
    """Join what torch's error file and the log say about one exception."""
    if filed is None or logged is None:
        return filed or logged
    return Fatal(
        signature=logged.signature if logged.frames else filed.signature,
        message=logged.message if logged.headline == filed.headline else filed.message,
        frame=logged.frame or filed.frame,
        frames=logged.frames or filed.frames,
        time_s=logged.time_s,
        epoch_s=filed.epoch_s,
        place=logged.place,
    )


def _story(
    rank: int | None,
    logs: _LogCollector,
    process_exit: ProcessExit | None,
    fatal: Fatal | None,
    unit: Unit,
) -> RankStory:
    """Return what is known of one rank."""
    return RankStory(
        rank=rank,
        exit=process_exit,
        fatal=fatal,
        events=tuple(logs.events),
        enqueued=tuple(logs.enqueued),
        stack_frame=next(filter(None, map(_stack_frame, reversed(logs.stacks))), None),
        last_words=_last_words([log for log in unit.logs if log.rank == rank]),
    )


def _stack_frame(where: tuple[LogFile, int]) -> str | None:
    """Return where a thread was, of a stack that faulthandler printed: deepest frame first.

    None for workers of a data loader, and where two processes wrote into one line.
    """
    log, offset = where
    frames: list[tuple[str, bool]] = []
    for line in read_lines(log.path, offset, _STACK_BYTES)[1:]:
        frame = frame_of(line.text)
        if frame is None:
            break
        frames.append(frame)
    if any(name.endswith(_LOADER_WORKER) for name, _ in frames):
        return None
    return innermost(frames)


def _last_words(logs: Sequence[LogFile]) -> tuple[LogLine, ...]:
    """Return the last lines that are no noise, of stderr if it has any."""
    order = (Stream.STDERR, Stream.LAUNCHER, Stream.BOTH, Stream.STDOUT)
    for log in sorted(logs, key=lambda log: order.index(log.stream)):
        lines = [line for line in _tail(log) if line.text.strip() and not is_noise(line.text)]
        if lines:
            return tuple(_place(log, line) for line in lines[-_LAST_WORDS:])
    return ()


def _tail(log: LogFile) -> list[Line]:
    """Return the last lines of a log; none where it cannot be read."""
    try:
        start = max(0, log.path.stat().st_size - _TAIL_BYTES)
        return read_lines(log.path, start, _TAIL_BYTES)
    except OSError:
        return []


def _place(log: LogFile, line: Line) -> LogLine:
    return LogLine(log=log, offset=line.offset, text=line.text)

"""Failures of the ranks of a phase, and the first of them.

Reads torch's `error.json`, the agent's own table of failures and the ends of the ranks' logs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_megatron.base.files import read_json
from pytest_megatron.runs.layout import PhaseDirs

_TAIL_BYTES = 1 << 16
_TAIL_LINES = 10
_TRACE_LINES = 30
_TRACE_STARTS = ("Traceback (most recent call last)", "Fatal Python error:")
_RANK_PREFIX = re.compile(r"^\[(?:rank|default)\d+\]: ?")
_TABLE_ROW = re.compile(
    r"\brank\s*:\s*(?P<rank>\d+)\s*\(local_rank:.*?\bexitcode\s*:\s*(?P<code>-?\d+)", re.DOTALL
)
_AGENT_PREFIX = re.compile(r"^\[[^\]]*\]:?", re.MULTILINE)
_SIGTERM = -15
# What ranks say when another rank died under them.
_CONSEQUENCE = re.compile(
    r"Connection (?:closed|reset) by peer|Broken pipe|ncclRemoteError|DistBackendError"
    r"|Watchdog caught collective|NCCL communicator was aborted|Socket closed|SIGTERM",
    re.IGNORECASE,
)
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<name>.+)$')
_LIBRARIES = ("/site-packages/", "/lib/python3")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """Failure of one rank.

    Attributes:
        exit_code: As the agent saw it, negative for a signal; None where it is unknown.
        message: `RuntimeError: ...`, or None where the rank raised nothing.
        timestamp: Seconds since the epoch as `error.json` has it, or None.
        frame: `file:line in name` of the innermost frame outside of libraries, or None.
        tail: The last lines of stderr.log.
        log: The file to read.
    """

    rank: int
    exit_code: int | None
    message: str | None
    timestamp: int | None
    frame: str | None
    tail: tuple[str, ...]
    log: Path

    @property
    def is_consequence(self) -> bool:
        """True if it only follows from another rank's end."""
        if self.message is not None:
            return _CONSEQUENCE.search(self.message) is not None
        return self.exit_code in (None, 0, _SIGTERM)


def read_failures(dirs: PhaseDirs) -> tuple[RankFailure, ...]:
    """Return what every rank left, by rank. Logs must be settled as `logs/<rank>/`."""
    codes = _exit_codes(dirs.launcher_log)
    ranks = sorted((p for p in dirs.logs.glob("*") if p.name.isdigit()), key=lambda p: int(p.name))
    return tuple(_read_rank(path, codes.get(int(path.name))) for path in ranks)


def first_failure(failures: Sequence[RankFailure]) -> RankFailure | None:
    """Return the failure that the others follow from, as far as files show; None without one.

    A signal comes before an exception, an exception before a consequence; then the clock decides,
    then the rank.
    """

    def order(failure: RankFailure) -> tuple[bool, bool, float, int]:
        is_signal = failure.exit_code is not None and failure.exit_code < 0
        when = float("inf") if failure.timestamp is None else failure.timestamp
        return failure.is_consequence, not is_signal, when, failure.rank

    guilty = [f for f in failures if f.message is not None or f.exit_code not in (None, 0)]
    return min(guilty, key=order, default=None)


def tail(path: Path, is_noise: Callable[[str], bool] | None = None) -> tuple[str, ...]:
    """Return the last meaningful lines of a log; none where it cannot be read.

    Of a log that ends in a traceback, only that, without torch's `[rank0]:` in front.

    Args:
        path: The log.
        is_noise: Returns if a line is meaningless; empty ones always are.
    """
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ()
    said = (_RANK_PREFIX.sub("", x).rstrip() for x in text.splitlines() if x.strip())
    lines = [line for line in said if is_noise is None or not is_noise(line)]
    starts = [index for index, line in enumerate(lines) if line.startswith(_TRACE_STARTS)]
    kept = lines[starts[-1] :] if starts else lines[-_TAIL_LINES:]
    if len(kept) > _TRACE_LINES:
        kept = [*kept[:2], "  ...", *kept[3 - _TRACE_LINES :]]
    return tuple(line for line in kept if not line.startswith("Extension modules:"))


def _read_rank(directory: Path, exit_code: int | None) -> RankFailure:
    log = directory / "stderr.log"
    lines = tail(log)
    message, timestamp = _read_error_file(directory / "error.json")
    return RankFailure(
        rank=int(directory.name),
        exit_code=exit_code,
        message=message or _raised(lines),
        timestamp=timestamp,
        frame=_innermost_frame(lines),
        tail=lines,
        log=log,
    )


def _exit_codes(launcher_log: Path) -> dict[int, int]:
    """Read the agent's table `rank : 1 (local_rank: 1) / exitcode : -9`."""
    try:
        text = launcher_log.read_text(errors="replace")
    except OSError:
        return {}
    text = _AGENT_PREFIX.sub("", text[-_TAIL_BYTES:])
    return {int(row["rank"]): int(row["code"]) for row in _TABLE_ROW.finditer(text)}


def _read_error_file(path: Path) -> tuple[str | None, int | None]:
    """Return message and time of torch's error file; it may be missing, torn or of another make."""
    try:
        content = read_json(path, is_lenient=True)
    except (OSError, ValueError):
        return None, None
    match content:
        case {"message": str(text)}:
            return text, None
        case {"message": {"message": text, "extraInfo": {"timestamp": int() | str() as time}}}:
            return str(text), int(time) if str(time).isdecimal() else None
        case _:
            return None, None


def _raised(lines: Sequence[str]) -> str | None:
    """Return the last line of a Python traceback at the end of a log."""
    for index, line in enumerate(lines):
        if line.startswith("Traceback (most recent call last)"):
            for candidate in lines[index + 1 :]:
                if re.match(
                    r"[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Warning)\b", candidate
                ):
                    return candidate
    return None


def _innermost_frame(lines: Sequence[str]) -> str | None:
    """Return the deepest frame outside of libraries: faulthandler prints it first, Python last."""
    is_fault = any("most recent call first" in line for line in lines)
    frames = [m for line in lines if (m := _FRAME.match(line))]
    own = [m for m in frames if not any(part in m["file"] for part in _LIBRARIES)]
    if not own:
        return None
    match = own[0] if is_fault else own[-1]
    return f"{Path(match['file']).name}:{match['line']} in {match['name']}"

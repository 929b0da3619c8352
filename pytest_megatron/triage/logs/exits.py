"""Read the ends of ranks as launchers report them: torch's agent, srun, mpirun and others. Pure.

Sources: torch/distributed/elastic/multiprocessing/errors (format of the failures), torch 2.11;
Slurm's srun, task exit messages; deepspeed/launcher/launch.py, 0.19; accelerate/commands/launch.py,
1.15, whose `simple_launcher` starts one process; lightning/fabric/strategies/launchers, 2.6.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from pytest_megatron.triage.logs.lines import parse_line, parse_time

# In every line that tells of an end, and so looked for.
LITERALS = (
    *("(local_rank: ", "failed (exitcode: ", "srun: error: ", "exited on signal"),
    *("forcefully exiting via", "died with <Signals.", "] Child process with PID "),
    *(" spawned with command: ", "exits with return code = "),
)
NEAR_BYTES = (600, 6000)  # before and behind a row of torch's table: what belongs to it

_ROW = re.compile(
    r"^ *rank +: +(?P<rank>\d+) \(local_rank: \d+\)\n"
    r"(?:.*\n){0,2}? *exitcode +: +(?P<code>-?\d+) *\(pid: (?P<pid>\d+)\)(?P<rest>[\s\S]*)",
    re.MULTILINE,
)
_TIME = re.compile(r"time +: +(\S+)")
_MESSAGE = re.compile(r"traceback +: +Traceback \(most recent call last\):\n(?P<text>[\s\S]*)")
_SEEN = re.compile(
    r"failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<rank>\d+) \(pid: (?P<pid>\d+)\)"
)
_SRUN = re.compile(
    r"^srun: error: (?P<host>\S+): tasks? (?P<ranks>[\d,\-]+): "
    r"(?:Exited with exit code (?P<code>\d+)|(?P<word>[A-Z][\w ]*))"
)
_FORCED = re.compile(r"Unable to shutdown process (?P<pid>\d+) via .*forcefully exiting via")
_MPIRUN = re.compile(r"process rank (?P<rank>\d+) .*exited on signal (?P<number>\d+)")
_LIGHTNING = re.compile(
    r"^\[rank: (?P<rank>\d+)\] Child process with PID (?P<pid>\d+) terminated with code "
    r"(?P<code>-?\d+)\b"
)
# DeepSpeed's names the rank that it started last, whichever failed.
_SPAWNED = re.compile(r"process \d+ spawned with command: .*'--local_rank=(?P<rank>\d+)'")
_ENDED = re.compile(r"\[launch\.py:\d+:\w+\] .*\] exits with return code = (?P<code>-\d+)$")
_ACCELERATE = re.compile(r"CalledProcessError: .* died with <Signals\.(?P<how>SIG\w+): \d+>")
_WORDS = {
    "Killed": "SIGKILL",
    "Segmentation fault": "SIGSEGV",
    "Aborted": "SIGABRT",
    "Terminated": "SIGTERM",
    "Bus error": "SIGBUS",
    "Out Of Memory": "SIGKILL",
    "OOM Killed": "SIGKILL",
    "Illegal instruction": "SIGILL",
}
_SIGNALS = {number.value: number.name for number in signal.Signals}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessExit:
    """End of one rank.

    Attributes:
        how: `SIGKILL`, or `exit code 3`.
        is_first: Whether the launcher saw it before every other one.
        time_s: When the launcher noticed it, to the second, or None.
        message: What the rank raised, as the launcher read it in its error file, or None.
        shift: Bytes from the line that reports it to the line that shows it best.
        shown: That line.
    """

    rank: int
    how: str
    is_first: bool = False
    time_s: float | None = None
    pid: int | None = None
    message: str | None = None
    shift: int = 0
    shown: str = ""


def how_it_ended(code: int) -> str:
    """Return `SIGKILL` for -9, `exit code 3` for 3: what the table of signatures is asked with."""
    if code < 0:
        return _SIGNALS.get(-code, f"SIG{-code}")
    return f"exit code {code}"


def read_exits(line: str, around: str, at: int) -> tuple[ProcessExit, ...]:
    """Return the ends that a line of a launcher's log reports.

    Args:
        line: The line, which holds one of `LITERALS`.
        around: The text around it; of torch's table the row is needed.
        at: Where the line begins in `around`.
    """
    text = parse_line(line).text
    if "(local_rank: " in text:
        found = _table_row(around, at)
        return () if found is None else (found,)
    if (seen := _SEEN.search(text) or _LIGHTNING.search(text)) is not None:
        code, rank = int(seen["code"]), int(seen["rank"])
        how, pid = how_it_ended(code), int(seen["pid"])
        is_first = "also failed (" not in text  # as tasks of Slurm are listed
        return (ProcessExit(rank=rank, how=how, is_first=is_first, pid=pid, shown=text),)
    if (task := _SRUN.match(text)) is not None:
        word = task["word"]
        how = f"exit code {task['code']}" if word is None else _WORDS.get(word.strip(), "")
        if not how:
            return ()
        return tuple(ProcessExit(rank=rank, how=how, shown=text) for rank in _ranks(task["ranks"]))
    if (process := _MPIRUN.search(text)) is not None:
        killed = how_it_ended(-int(process["number"]))
        return (ProcessExit(rank=int(process["rank"]), how=killed, shown=text),)
    lone = _ACCELERATE.search(text) if "in simple_launcher" in around[:at] else None
    return () if lone is None else (ProcessExit(rank=0, how=lone["how"], shown=text),)


def spawned_rank(line: str) -> int | None:
    """Return the rank that DeepSpeed's launcher says it started."""
    found = _SPAWNED.search(line)
    return None if found is None else int(found["rank"])


def unnamed_signal(line: str) -> str | None:
    """Return the signal that ended a rank of DeepSpeed's launcher, which does not say which."""
    found = _ENDED.search(line)
    return None if found is None else how_it_ended(int(found["code"]))


def stubborn_pid(line: str) -> int | None:
    """Return the process that torch's agent killed, as it had not heard its SIGTERM."""
    found = _FORCED.search(line)
    return None if found is None else int(found["pid"])


def excuse(process_exit: ProcessExit, stubborn: Collection[int | None]) -> ProcessExit:
    """Return the end of a rank that the agent killed as the SIGTERM that it had not heard."""
    return (
        replace(process_exit, how="SIGTERM")
        if process_exit.pid is not None and process_exit.pid in stubborn
        else process_exit
    )


def merge_exits(exits: Sequence[ProcessExit]) -> dict[int, ProcessExit]:
    """Return one end for each rank; a row of torch's table wins over any other line."""
    found: dict[int, ProcessExit] = {}
    for exit_ in exits:
        before = found.get(exit_.rank)
        if before is None or before.time_s is None:
            found[exit_.rank] = exit_
    return found


def _table_row(around: str, at: int) -> ProcessExit | None:
    """Read `rank : 1 (local_rank: 1)` and the lines that belong to it."""
    plain = "\n".join(parse_line(line).text for line in around[at:].split("\n"))
    row = _ROW.match(plain)
    if row is None:
        return None
    before = around[:at]
    block = before[max(before.rfind("]:"), 0) :]
    time = _TIME.search(block)
    rest = re.split(r"\n(?:\[\d+\]:|-{10,}|={10,})", row["rest"])[0]
    message = _MESSAGE.search(rest)
    raised = "" if message is None else message["text"].strip().rpartition("\n")[2].strip()
    shift = max(0, around.find("exitcode", at) - at)
    return ProcessExit(
        rank=int(row["rank"]),
        how=how_it_ended(int(row["code"])),
        is_first="Root Cause" in before[-400:],
        time_s=None if time is None else parse_time(time[1]),
        pid=int(row["pid"]),
        message=raised or None,
        shift=len(around[at : at + shift].encode()),
        shown=around[at + shift :].partition("\n")[0],
    )


def _ranks(text: str) -> Iterator[int]:
    """Yield the numbers of `0,2-3`."""
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            yield from range(int(first), int(last or first) + 1)

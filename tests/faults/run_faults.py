"""Runs every fault at every place in sessions of real ranks, and checks all that a user relies on.

    python tests/faults/run_faults.py --worlds 2,4,8 --device cpu --positions first,middle,last

A case is right if the guilty test is reported with its rank, at the latest a grace (or the time
limit of a pure hang) after the fault; if all other tests ran to their true outcome; if exit code
and JUnit XML say the same; and if no process and no socket is left. Faults that leave the session
alive share one session for each world size and position, each in a file of its own; those that end
it, and with `--single` all, have sessions of their own. Prints a line for each, and exits with 1 if
any is wrong. Needs nothing but the package, torch and pytest.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from fault_cases import CASES, Case

HERE = Path(__file__).parent
TAG = "FAULT_SESSION"  # in the environment of every process of a session
POSITIONS = ("first", "middle", "last")
GONE_S = 10.0  # for what is left of a controller that was killed
# What stands around a fault: tests with outcomes of their own, which must stay true.
INNOCENTS = ("sound", "skips", "sound", "fails", "sound")
TRUE_OUTCOMES = {"sound": "passed", "skips": "skipped", "fails": "failed"}
JUNIT_WORDS = {"failed": "failure", "error": "error", "skipped": "skipped"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long things may take.

    Attributes:
        grace_s: `--rank-grace` of the sessions.
        hang_s: Time limit of tests that hang.
        slack_s: What a busy machine may add to either.
        session_s: For one session, at the most.
    """

    grace_s: float = 2.0
    hang_s: float = 2.0
    slack_s: float = 5.0
    session_s: float = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One test of a session; `case` is None for an innocent one."""

    number: int
    name: str
    case: Case | None = None

    @property
    def test(self) -> str:
        return f"test_{self.number:03}_{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A session to run.

    Attributes:
        files: Tests by file.
        fault_at_end: How the session fixture strikes, if it does.
    """

    world_size: int
    position: str
    device: str
    files: tuple[tuple[Slot, ...], ...]
    fault_at_end: str = ""

    @property
    def slots(self) -> tuple[Slot, ...]:
        return tuple(slot for file in self.files for slot in file)

    @property
    def lone_case(self) -> Case | None:
        cases = [slot.case for slot in self.slots if slot.case is not None]
        return cases[0] if len(cases) == 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a session left."""

    exit_code: int | None
    output: str
    junit: dict[str, list[tuple[str, str, str]]]  # test -> kind, message and text of each element
    events: list[dict[str, str | float]]
    num_left: int
    sockets: list[str]
    end_s: float  # from the last thing that was done to it from outside to its end
    duration_s: float

    def times(self, event: str, test: str) -> list[float]:
        return [float(e["at"]) for e in self.events if (e["event"], e.get("test")) == (event, test)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of a case.

    Attributes:
        problems: Empty if all is right.
        detection_s: From the fault to the report.
        recovery_s: From the fault to the start of the next test.
    """

    case: str
    world_size: int
    position: str
    problems: list[str] = field(default_factory=list)
    detection_s: float | None = None
    recovery_s: float | None = None

    @property
    def line(self) -> str:
        word = "ok   " if not self.problems else "WRONG"
        seconds = "" if self.detection_s is None else f"{self.detection_s:7.2f} s"
        head = f"{word} world {self.world_size} {self.position:6} {self.case:24}{seconds}"
        return "\n".join([head.rstrip(), *(f"      {p}" for p in self.problems)])


# Sessions


def plan(
    cases: Sequence[Case], *, world_size: int, position: str, device: str, is_single: bool
) -> list[Session]:
    """Return the sessions that the cases need at one world size and position."""
    shared = [case for case in cases if not (case.is_alone or is_single)]
    sessions = []
    if shared:
        files: list[tuple[Slot, ...]] = []
        for case in shared:
            start = sum(map(len, files))
            innocents = INNOCENTS[len(files) % len(INNOCENTS) :] + INNOCENTS
            files.append(_around(case, position, innocents[:2], start))
        sessions.append(
            Session(
                world_size=world_size, position=position, device=device, files=tuple(files)
            )
        )
    for case in cases:
        if case not in shared:
            file = _around(case, position, (*INNOCENTS, "sound", "sound"), 0)
            at_end = case.way if case.place == "end" else ""
            sessions.append(
                Session(
                    world_size=world_size,
                    position=position,
                    device=device,
                    files=(file,),
                    fault_at_end=at_end,
                )
            )
    return sessions


def _around(
    case: Case, position: str, innocents: Sequence[str], start: int
) -> tuple[Slot, ...]:
    place = {"first": 0, "middle": (len(innocents) + 1) // 2, "last": len(innocents)}[position]
    names: list[tuple[str, Case | None]] = [(name, None) for name in innocents]
    names.insert(place, (case.name, case))
    return tuple(
        Slot(number=start + i, name=name, case=c) for i, (name, c) in enumerate(names)
    )


def _test_text(slot: Slot, limits: Limits) -> str:
    case = slot.case
    lines = []
    arguments = ["gang"]
    if case is not None:
        if case.sign == "limit":
            lines.append(f"@pytest.mark.timeout({limits.hang_s})")
        if case.way:
            lines.append(f"@pytest.mark.way({case.way!r})")
        if case.place != "call":
            arguments.insert(0, f"at_{case.place}")
    body = slot.name if case is None else case.guest_body
    lines += [
        f"def {slot.test}({', '.join(arguments)}):",
        f"    fault_guest.run({body!r}, gang)",
    ]
    return "\n".join(lines)


def write_guest(directory: Path, session: Session, limits: Limits) -> None:
    """Write the files of a session."""
    (directory / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers\n")
    for number, file in enumerate(session.files):
        tests = [_test_text(slot, limits) for slot in file]
        text = "\n\n\n".join(["import fault_guest\nimport pytest", *tests])
        (directory / f"test_guest_{number:02}.py").write_text(text + "\n")


def run_session(session: Session, limits: Limits, temp: Path, extra: Sequence[str] = ()) -> Seen:
    """Run a session to its end, whatever it does, and look at what it left."""
    directory = Path(tempfile.mkdtemp(prefix="session-", dir=temp))
    sockets = Path(tempfile.mkdtemp(prefix="ptmf-", dir="/tmp"))  # noqa: S108 - short, private
    write_guest(directory, session, limits)
    case = session.lone_case
    driver = case.driver if case is not None else ""
    tag = uuid.uuid4().hex
    try:
        with _disk(directory / "disk", is_small=driver == "full_disk") as disk:
            command = [
                *(sys.executable, "-m", "pytest", "-p", "megatron", "-p", "fault_guest"),
                *("--ranks", str(session.world_size), "--device", session.device),
                *("--rank-grace", str(limits.grace_s), "--rank-timeout", "120", "-rA"),
                *("--run-dir", str(disk / "run"), "--basetemp", str(directory / "temp")),
                *("--junitxml", str(directory / "junit.xml"), "-p", "no:cacheprovider", *extra),
            ]
            started = time.monotonic()
            with (directory / "output.txt").open("wb") as output:
                process = subprocess.Popen(
                    command,
                    cwd=directory,
                    env=_env(session, directory, sockets, tag),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                acted = _drive(driver, process, directory, limits)
                try:
                    exit_code: int | None = process.wait(limits.session_s)
                except subprocess.TimeoutExpired:
                    exit_code = None
            ended = time.monotonic()
            num_left = _count_left(tag, GONE_S if driver == "kill" else 1.0)
            _kill_tagged(tag)
            process.wait()
        return Seen(
            exit_code=exit_code,
            output=(directory / "output.txt").read_text(errors="replace"),
            junit=read_junit(directory / "junit.xml"),
            events=_read_events(directory),
            num_left=num_left,
            sockets=sorted(path.name for path in sockets.glob("ptm-*")),
            end_s=ended - (started if acted is None else acted),
            duration_s=ended - started,
        )
    finally:
        shutil.rmtree(sockets, ignore_errors=True)


def _env(session: Session, directory: Path, sockets: Path, tag: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "COV_"))}
    path = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return kept | {
        TAG: tag,
        "FAULT_DIR": str(directory),
        "FAULT_AT_END": session.fault_at_end,
        "PYTHONPATH": os.pathsep.join(path),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "TMPDIR": str(sockets),
        "COLUMNS": "300",
        "NCCL_NVLS_ENABLE": "0",
        "OMP_NUM_THREADS": "1",
    }


def _drive(
    driver: str, process: subprocess.Popen[bytes], directory: Path, limits: Limits
) -> float | None:
    """Do to the session what the case asks for once the fault stands; return when."""
    if driver not in ("int", "int_int", "kill"):
        return None
    deadline = time.monotonic() + limits.session_s
    while not any(e["event"] == "sign" for e in _read_events(directory)):
        if process.poll() is not None or time.monotonic() > deadline:
            return None
        time.sleep(0.02)
    if driver == "kill":
        process.kill()
        return time.monotonic()
    process.send_signal(signal.SIGINT)
    if driver == "int_int":
        while process.poll() is None and not _has_interrupt_begun(directory):
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
    return time.monotonic()


def _has_interrupt_begun(directory: Path) -> bool:
    return any(e["event"] == "interrupt" for e in _read_events(directory))


@contextmanager
def _disk(path: Path, *, is_small: bool) -> Iterator[Path]:
    """Yield a directory; a small one is a file system that a few logs fill."""
    path.mkdir()
    if not is_small:
        yield path
        return
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(path)]
    subprocess.run(mount, check=True, capture_output=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def can_mount() -> bool:
    """Whether this user may make the small disk."""
    with tempfile.TemporaryDirectory() as directory:
        try:
            with _disk(Path(directory, "disk"), is_small=True):
                return True
        except (OSError, subprocess.CalledProcessError):
            return False


def _tagged(tag: str) -> list[int]:
    """Return living processes of a session."""
    wanted = f"{TAG}={tag}".encode()
    found = []
    for entry in os.scandir("/proc"):
        try:
            if entry.name.isdigit() and wanted in Path(entry.path, "environ").read_bytes():
                state = Path(entry.path, "stat").read_text().rpartition(")")[2].split()[0]
                if state not in "ZX":
                    found.append(int(entry.name))
        except OSError:
            continue
    return found


def _count_left(tag: str, within_s: float) -> int:
    deadline = time.monotonic() + within_s
    while (left := _tagged(tag)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return len(left)


def _kill_tagged(tag: str) -> None:
    while left := _tagged(tag):
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.05)


def _read_events(directory: Path) -> list[dict[str, str | float]]:
    try:
        lines = (directory / "events.jsonl").read_text().splitlines()
    except OSError:
        return []
    return [json.loads(line) for line in lines]


def read_junit(path: Path) -> dict[str, list[tuple[str, str, str]]]:
    """Return what a JUnit file says of each test: kind, message and text, `passed` for none."""
    found: dict[str, list[tuple[str, str, str]]] = {}
    try:
        root = ET.parse(path).getroot()  # noqa: S314 - our own pytest wrote it
    except (OSError, ET.ParseError):
        return found
    for test in root.iter("testcase"):
        words = [
            (child.tag, child.get("message", ""), child.text or "")
            for child in test
            if child.tag in JUNIT_WORDS.values()
        ]
        found.setdefault(str(test.get("name")), []).extend(words or [("passed", "", "")])
    return found


# Checks


def judge(session: Session, seen: Seen, limits: Limits) -> list[Verdict]:
    """Return a verdict for each case of a session; what belongs to none is in the first."""
    lone = session.lone_case
    wanted = expected_kinds(session)
    general = [*_check_session(session, seen, lone, limits), *_check_innocents(session, seen, wanted)]
    verdicts = []
    for slot in session.slots:
        case = slot.case
        if case is None:
            continue
        reported = session.slots[-1] if case.place == "end" else slot
        detection_s = _detection_s(seen, reported, case)
        problems = _check_case(session, seen, slot, reported, wanted[reported.test], limits)
        verdicts.append(
            Verdict(
                case=case.name,
                world_size=session.world_size,
                position=session.position,
                problems=(general if not verdicts else []) + problems,
                detection_s=detection_s,
                recovery_s=_recovery_s(session, seen, slot) if case.is_instant else None,
            )
        )
    return verdicts


def expected_kinds(session: Session) -> dict[str, str]:
    """Return the kind of JUnit element that each test must have; `none` for no test case."""
    kinds: dict[str, str] = {}
    has_ended = False
    for slot in session.slots:
        outcome = TRUE_OUTCOMES.get(slot.name, "") if slot.case is None else slot.case.outcome
        if slot.case is not None and slot.case.place == "end":
            outcome = "passed"
        has_ended = has_ended or outcome == "none"
        kinds[slot.test] = "none" if has_ended else JUNIT_WORDS.get(outcome, outcome)
    if session.fault_at_end:
        kinds[session.slots[-1].test] = "error"
    return kinds


def _check_session(
    session: Session, seen: Seen, lone: Case | None, limits: Limits
) -> Iterator[str]:
    kinds = set(expected_kinds(session).values())
    if lone is not None and lone.exit_code is not None:
        wanted = lone.exit_code
    else:
        wanted = 1 if kinds & {"failure", "error"} else 0
    if seen.exit_code != wanted:
        yield f"exit code {seen.exit_code}, expected {wanted}"
    if seen.num_left:
        yield f"{seen.num_left} processes are left"
    if seen.sockets:
        yield f"sockets are left: {seen.sockets}"
    for word in ("INTERNALERROR", "PytestUnraisable", "Exception ignored"):
        if word in seen.output:
            yield f"{word} in the output"
    if lone is not None and lone.driver in ("int", "int_int"):
        most = limits.slack_s + (0 if lone.driver == "int_int" else limits.grace_s)
        if seen.end_s > most:
            yield f"ended {seen.end_s:.1f} s after Ctrl-C, at most {most:g} s were expected"


def _check_innocents(session: Session, seen: Seen, wanted: dict[str, str]) -> Iterator[str]:
    is_killed = seen.exit_code is not None and seen.exit_code < 0
    for slot in session.slots:
        kinds = [kind for kind, _, _ in seen.junit.get(slot.test, [])] or ["none"]
        if slot.case is None and kinds != [wanted[slot.test]] and not is_killed:
            if not (session.fault_at_end and slot is session.slots[-1]):
                yield f"{slot.test}: {'+'.join(kinds)}, expected {wanted[slot.test]}"
    if not is_killed and (strangers := set(seen.junit) - set(wanted)):
        yield f"JUnit has tests that are not there: {sorted(strangers)}"


def _check_case(
    session: Session, seen: Seen, slot: Slot, reported: Slot, wanted: str, limits: Limits
) -> list[str]:
    case = slot.case
    assert case is not None
    problems: list[str] = []
    guilty = 0 if case.is_first_rank else session.world_size - 1
    facts = {"g": str(guilty), "w": str(session.world_size)}
    if not seen.times("sign", slot.test) and case.place != "end":
        problems.append("the fault never struck")
    if case.prints and not re.search(_fill(case.prints, facts), seen.output):
        problems.append(f"the output does not say {_fill(case.prints, facts)!r}")
    if case.driver == "kill":
        return problems
    elements = seen.junit.get(reported.test, [])
    kinds = [kind for kind, _, _ in elements] or ["none"]
    if kinds != [wanted]:
        problems.append(f"JUnit says {'+'.join(kinds)}, expected {wanted}")
    if wanted not in ("failure", "error"):
        return problems
    message, text = next(((m, t) for k, m, t in elements if k == wanted), ("", ""))
    summary = re.search(rf"^(?:FAILED|ERROR) \S+::{reported.test} - (.*)$", seen.output, re.M)
    if summary is None or "rank" not in summary[1]:
        problems.append(f"the summary names no rank: {summary and summary[1]!r}")
    whole = f"{re.sub('^failed on (?:setup|teardown) with .', '', message)}\n{text}"
    if not re.search(_fill(case.says, facts), whole, re.M):
        problems.append(f"the report does not say {_fill(case.says, facts)!r} but {whole[:300]!r}")
    problems += _check_blocks(session, case, guilty, text)
    problems += _check_time(seen, reported, case, limits)
    return problems


def _fill(pattern: str, facts: dict[str, str]) -> str:
    return re.sub(r"\{([gw])\}", lambda found: facts[found[1]], pattern)


def _check_blocks(session: Session, case: Case, guilty: int, text: str) -> Iterator[str]:
    """Look for the stack of every rank that hangs, and the list of what each rank did."""
    ranks = set(range(session.world_size))
    hanging = {"": set(), "all": ranks, "others": ranks - {guilty}, "guilty": {guilty}}[
        case.has_stacks
    ]
    shown = {n for title in re.findall(r"-+ stack of ranks? (\S.*?) -+\n", text) for n in _numbers(title)}
    if missing := hanging - shown:
        yield f"no stack of ranks {sorted(missing)}"
    listed = {
        n
        for title in re.findall(r"(?m)^ranks? ([\d, -]+): ", text)
        for n in _numbers(title)
    }
    if ranks - listed:
        yield f"does not say what ranks {sorted(ranks - listed)} did"
    if case.has_flight and session.device == "cuda":
        if "collectives, by NCCL's flight recorder" not in text:
            yield "NCCL's flight recorder is not in the report"
        elif f"not by rank {guilty}" not in text:
            yield f"NCCL's flight recorder does not say that rank {guilty} missed a collective"


def _numbers(text: str) -> set[int]:
    """Return the numbers of `0-2, 4`."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def _check_time(seen: Seen, reported: Slot, case: Case, limits: Limits) -> Iterator[str]:
    found = _detection_s(seen, reported, case)
    most = (limits.hang_s if case.sign == "limit" else limits.grace_s) + limits.slack_s
    if found is not None and found > most:
        yield f"reported after {found:.1f} s, at most {most:g} s were expected"


def _detection_s(seen: Seen, reported: Slot, case: Case) -> float | None:
    """Return the time between the fault and the report of its test."""
    signs = seen.times("sign", reported.test)
    reports = [
        float(e["at"])
        for e in seen.events
        if e["event"] == "report" and e["test"] == reported.test and e["outcome"] != "passed"
    ]
    return reports[0] - min(signs) if signs and reports and case.outcome != "passed" else None


def _recovery_s(session: Session, seen: Seen, slot: Slot) -> float | None:
    place = session.slots.index(slot)
    if place + 1 == len(session.slots):
        return None
    starts = seen.times("start", session.slots[place + 1].test)
    signs = seen.times("sign", slot.test)
    return starts[0] - max(signs) if starts and signs else None


# The program


def main() -> int:
    """Run what was asked for."""
    asked = _parse()
    limits = Limits(
        grace_s=asked.grace,
        hang_s=asked.hang_limit or (10.0 if asked.device == "cuda" else 2.0),
        slack_s=asked.slack,
        session_s=asked.session_limit,
    )
    cases = _choose(asked.cases, asked.device)
    sessions = [
        session
        for world_size in asked.worlds
        for position in asked.positions
        for session in plan(
            cases,
            world_size=world_size,
            position=position,
            device=asked.device,
            is_single=asked.single,
        )
    ]
    started = time.monotonic()
    temp = Path(tempfile.mkdtemp(prefix="faults-"))
    verdicts: list[Verdict] = []

    def run(session: Session) -> list[Verdict]:
        seen = run_session(session, limits, temp)
        found = judge(session, seen, limits)
        print("\n".join(v.line for v in found), flush=True)
        if any(v.problems for v in found):
            print(_quote(seen) if asked.verbose else f"      see {temp}", flush=True)
        return found

    with ThreadPoolExecutor(asked.jobs) as pool:
        for found in pool.map(run, sessions):
            verdicts += found
    num_wrong = sum(bool(v.problems) for v in verdicts)
    recoveries = [v.recovery_s for v in verdicts if v.recovery_s is not None]
    if recoveries:
        print(
            f"recovery, from a death to the start of the next test: median "
            f"{statistics.median(recoveries):.3f} s, most {max(recoveries):.3f} s of {len(recoveries)}"
        )
    print(
        f"{len(verdicts) - num_wrong} right, {num_wrong} wrong, {len(sessions)} sessions "
        f"in {time.monotonic() - started:.0f} s"
    )
    if asked.json is not None:
        asked.json.write_text(json.dumps([asdict(v) for v in verdicts], indent=1))
    if not num_wrong:
        shutil.rmtree(temp)
    return 1 if num_wrong else 0


def _quote(seen: Seen) -> str:
    return "\n".join(f"      | {line}" for line in seen.output.splitlines())


def _choose(names: Sequence[str], device: str) -> list[Case]:
    unknown = set(names) - {case.name for case in CASES}
    if unknown:
        known = ", ".join(sorted(case.name for case in CASES))
        raise SystemExit(f"--cases: unknown {', '.join(sorted(unknown))}, expected of {known}")
    chosen = [c for c in CASES if device in c.devices and (not names or c.name in names)]
    if any(c.driver == "full_disk" for c in chosen) and not can_mount():
        print("left out: floods_full_disk, as this user may not mount a small disk")
        chosen = [c for c in chosen if c.driver != "full_disk"]
    return chosen


def _parse() -> argparse.Namespace:
    def words(text: str) -> list[str]:
        return [word for word in text.split(",") if word]

    def numbers(text: str) -> list[int]:
        return [int(word) for word in words(text)]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    option: Callable[..., object] = parser.add_argument
    option("--worlds", type=numbers, default=[2, 4, 8], help="world sizes")
    option("--device", choices=("cpu", "cuda"), default="cpu")
    option("--positions", type=words, default=list(POSITIONS), help="first, middle, last")
    option("--cases", type=words, default=[], help="names; by default all")
    option("--jobs", type=int, default=2, help="sessions at one time")
    option("--single", action="store_true", help="each case in a session of its own")
    option("--grace", type=float, default=2.0, help="--rank-grace of the sessions")
    option("--hang-limit", type=float, default=0.0, help="time limit of tests that hang")
    option("--slack", type=float, default=5.0, help="what a busy machine may add, in seconds")
    option("--session-limit", type=float, default=600.0, help="for one session, in seconds")
    option("--json", type=Path, help="file for the results")
    option("--verbose", action="store_true", help="print the output of sessions that are wrong")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

"""Sessions of the fault program: which tests are in them, running them, what they leave."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from fault_cases import STOPPED, Case

HERE = Path(__file__).parent
TAG = "FAULT_SESSION"  # in the environment of every process of a session
GONE_S = 10.0  # for what is left of a controller that was killed
# What stands around a fault: tests with outcomes of their own, which must stay true.
INNOCENTS = ("sound", "skips", "sound", "fails", "sound")
TRUE_OUTCOMES = {"sound": "passed", "skips": "skipped", "fails": "failed"}
KILLS = ("kill", "stop_kill")
FROM_OUTSIDE = ("int", "int_int", *KILLS)
_FULL_S = 1.0  # for ranks to fill what the controller does not read
# A driver makes and ends the contexts of all processes one after the other: small ones, then.
SMALL_CONTEXTS = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "CUDA_SCALE_LAUNCH_QUEUES": "0.25x",
    "NCCL_MAX_NCHANNELS": "1",
    "NCCL_BUFFSIZE": "262144",
    "NCCL_SOCKET_NTHREADS": "1",
    "NCCL_NSOCKS_PERTHREAD": "1",
}
JUNIT_WORDS = {"failed": "failure", "error": "error", "skipped": "skipped"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long things may take.

    Attributes:
        grace_s: `megatron_rank_grace` of the sessions.
        hang_s: Time limit of tests that hang.
        slack_s: What a busy machine may add to either.
        session_s: For one session, at the most.
    """

    grace_s: float = 2.0
    hang_s: float = 2.0
    slack_s: float = 10.0
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
        ranks_per_gpu: Ranks that share a GPU, where there are fewer than ranks.
    """

    world_size: int
    position: str
    device: str
    files: tuple[tuple[Slot, ...], ...]
    fault_at_end: str = ""
    ranks_per_gpu: int = 1

    @property
    def slots(self) -> tuple[Slot, ...]:
        return tuple(slot for file in self.files for slot in file)

    @property
    def options(self) -> tuple[str, ...]:
        """Those of its cases, which have the same ones."""
        return next(slot.case.options for slot in self.slots if slot.case is not None)

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
    left: list[str]  # processes: number, name, state, parent, group, session
    end_s: float  # from the last thing that was done to it from outside to its end

    def times(self, event: str, test: str) -> list[float]:
        return [float(e["at"]) for e in self.events if (e["event"], e.get("test")) == (event, test)]


def plan(
    cases: Sequence[Case],
    *,
    world_size: int,
    position: str,
    device: str,
    parts: int = 1,
) -> list[Session]:
    """Return the sessions that the cases need at one world size and position.

    Args:
        parts: Into how many the one of those without options is divided, to run several at a time.
    """
    shared = [case for case in cases if not case.is_alone]
    by_options: dict[tuple[str, ...], list[Case]] = {}
    for case in shared:
        by_options.setdefault(case.options, []).append(case)
    plain = by_options.pop((), [])
    groups = [*(plain[part::parts] for part in range(parts)), *by_options.values()]
    sessions: list[Session] = []
    for group in filter(None, groups):
        files: list[tuple[Slot, ...]] = []
        for case in group:
            start = sum(map(len, files))
            innocents = INNOCENTS[len(files) % len(INNOCENTS) :] + INNOCENTS
            files += _files_of(case, position, innocents[:2], start)
        sessions.append(
            Session(world_size=world_size, position=position, device=device, files=tuple(files))
        )
    sessions += [
        Session(
            world_size=world_size,
            position=position,
            device=device,
            files=tuple(_files_of(case, position, (*INNOCENTS, "sound", "sound"), 0)),
            fault_at_end=case.way if case.place == "end" else "",
        )
        for case in cases
        if case not in shared
    ]
    return sessions


def _files_of(
    case: Case, position: str, innocents: Sequence[str], start: int
) -> list[tuple[Slot, ...]]:
    slots = _around(case, position, innocents, start)
    if not case.has_own_file:
        return [slots]
    place = next(i for i, slot in enumerate(slots) if slot.case is not None)
    pieces = (slots[:place], slots[place : place + 1], slots[place + 1 :])
    return [piece for piece in pieces if piece]


def _around(case: Case, position: str, innocents: Sequence[str], start: int) -> tuple[Slot, ...]:
    place = {"first": 0, "middle": (len(innocents) + 1) // 2, "last": len(innocents)}[position]
    names: list[tuple[str, Case | None]] = [(name, None) for name in innocents]
    names.insert(place, (case.name, case))
    return tuple(Slot(number=start + i, name=name, case=c) for i, (name, c) in enumerate(names))


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
        ends = [s.case.text.replace("{test}", s.test) for s in file if s.case and s.case.text]
        text = "\n\n\n".join(["import fault_guest\nimport pytest", *tests, *ends])
        (directory / f"test_guest_{number:02}.py").write_text(text + "\n")


class Process(Protocol):
    """A session that runs."""

    def poll(self) -> int | None: ...

    def wait(self, timeout: float) -> int: ...

    def send_signal(self, number: int) -> None: ...

    def kill(self) -> None: ...


class Start(Protocol):
    """Start pytest, with its output and errors in a file."""

    def __call__(
        self, arguments: Sequence[str], cwd: Path, env: Mapping[str, str], output: BinaryIO
    ) -> Process: ...


def start_process(
    arguments: Sequence[str], cwd: Path, env: Mapping[str, str], output: BinaryIO
) -> subprocess.Popen[bytes]:
    """Start pytest as a new process."""
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", *arguments],
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def run_session(session: Session, limits: Limits, temp: Path, start: Start = start_process) -> Seen:
    """Run a session to its end, whatever it does, and look at what it left."""
    directory = Path(tempfile.mkdtemp(prefix="session-", dir=temp))
    write_guest(directory, session, limits)
    case = session.lone_case
    driver = case.driver if case is not None else ""
    tag = uuid.uuid4().hex
    with _disk(directory / "disk", is_small=driver == "full_disk") as disk:
        arguments = [
            *("-p", "megatron", "-p", "fault_guest"),
            *("--ranks", str(session.world_size), "--device", session.device),
            *("--ranks-per-gpu", str(session.ranks_per_gpu)),
            *("-o", f"megatron_rank_grace={limits.grace_s}", "--rank-timeout", "120", "-rA"),
            *("--run-dir", str(disk / "run"), "--basetemp", str(directory / "temp")),
            *("--junitxml", str(directory / "junit.xml"), "-p", "no:cacheprovider"),
            *session.options,
        ]
        started = time.monotonic()
        with (directory / "output.txt").open("wb") as output:
            env = _env(session, directory, tag)
            process = start(arguments, directory, env, output)
            acted = _drive(session, process, directory, limits)
            try:
                exit_code: int | None = process.wait(limits.session_s)
            except subprocess.TimeoutExpired:
                exit_code = None
        ended = time.monotonic()
        left = _wait_for_end(tag, directory, GONE_S if driver in KILLS else 1.0)
        _kill(tag, directory)
        process.wait(GONE_S)
    return Seen(
        exit_code=exit_code,
        output=(directory / "output.txt").read_text(errors="replace"),
        junit=read_junit(directory / "junit.xml"),
        events=_read_events(directory),
        left=left,
        end_s=ended - (started if acted is None else acted),
    )


def _env(session: Session, directory: Path, tag: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "COV_"))}
    path = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    small = SMALL_CONTEXTS if session.ranks_per_gpu > 1 else {}
    return {
        **small,
        **kept,
        TAG: tag,
        "FAULT_DIR": str(directory),
        "FAULT_AT_END": session.fault_at_end,
        "PYTHONPATH": os.pathsep.join(path),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "COLUMNS": "300",
        "NCCL_NVLS_ENABLE": "0",
        "OMP_NUM_THREADS": "1",
        # torch looks up the name of every address that it connects to, and glibc waits 5 s for a
        # name server that does not answer: longer than the time limit of tests that hang.
        "RES_OPTIONS": "timeout:1 attempts:1",
    }


def _drive(session: Session, process: Process, directory: Path, limits: Limits) -> float | None:
    """Do to the session what the case asks for once the fault stands; return when."""
    driver = "" if session.lone_case is None else session.lone_case.driver
    if driver not in FROM_OUTSIDE:
        return None
    deadline = time.monotonic() + limits.session_s
    num_before = next(i for i, slot in enumerate(session.slots) if slot.case is not None)
    while not _stands(_read_events(directory), num_before):
        if process.poll() is not None or time.monotonic() > deadline:
            return None
        time.sleep(0.02)
    if driver == "stop_kill":
        process.send_signal(signal.SIGSTOP)
        (directory / STOPPED).touch()
        time.sleep(_FULL_S)
    if driver in KILLS:
        process.kill()
        return time.monotonic()
    process.send_signal(signal.SIGINT)
    if driver == "int_int":
        while process.poll() is None and not _has_interrupt_begun(directory):
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
    return time.monotonic()


def _stands(events: Sequence[dict[str, str | float]], num_before: int) -> bool:
    """Whether the fault struck, and all tests before it are reported."""
    num_reported = sum(e["event"] == "report" and e["when"] == "teardown" for e in events)
    return num_reported >= num_before and any(e["event"] == "sign" for e in events)


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
        umount = ["umount", "-l", str(path)]
        subprocess.run(umount, check=True)


def can_mount() -> bool:
    """Whether this user may make the small disk."""
    with tempfile.TemporaryDirectory() as directory:
        try:
            with _disk(Path(directory, "disk"), is_small=True):
                return True
        except (OSError, subprocess.CalledProcessError):
            return False


def _living(tag: str, directory: Path) -> list[int]:
    """Return living processes of a session, by their variables or their directory."""
    wanted = f"{TAG}={tag}".encode()
    found = []
    for entry in os.scandir("/proc"):
        try:
            if not entry.name.isdigit():
                continue
            process = Path(entry.path)
            if (
                wanted in (process / "environ").read_bytes()
                or directory == (process / "cwd").readlink()
            ):
                state = (process / "stat").read_text().rpartition(")")[2].split()[0]
                if state not in "ZX":
                    found.append(int(entry.name))
        except OSError:
            continue
    return found


def _wait_for_end(tag: str, directory: Path, within_s: float) -> list[str]:
    """Return what is left of a session after a moment."""
    deadline = time.monotonic() + within_s
    while (left := _living(tag, directory)) and time.monotonic() < deadline:
        time.sleep(0.05)
    found = []
    for pid in left:
        with suppress(OSError):
            found.append(" ".join(Path(f"/proc/{pid}/stat").read_text().split()[:6]))
    return found


def _kill(tag: str, directory: Path) -> None:
    while left := _living(tag, directory):
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

"""`pytest-megatron watch`: what starts a session, what each of them has, and how all ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import pytest
from gang_suite import processes_with
from labs import wait_until

MARK = "WATCHED_PROJECT"
WAITING = "watch: waiting for a change; Ctrl-C ends"
COMMAND = (str(Path(sys.executable).with_name("pytest-megatron")), "watch")
TORCH = """
    import pathlib
    with pathlib.Path(__file__).with_name("loads").open("a") as file:
        file.write("x")
    __version__ = "2.9"
    initial_seed = lambda: 1 << 60
    set_num_threads = lambda _: None

    class default_generator:
        manual_seed = lambda _: None
"""
HANGS = """
    import pathlib, time

    def test_hangs(rank):
        pathlib.Path(f"began.{rank}").touch()
        time.sleep(600)
"""


@dataclass
class Project:
    """A project, and packages beside it, with a torch that costs nothing.

    Attributes:
        process: Of `watch`, once it was started.
        output: Lines that it has shown since `wait`.
        reader: Reads them.
    """

    root: Path
    process: subprocess.Popen[bytes] | None = None
    output: list[str] = field(default_factory=list)
    reader: threading.Thread | None = None

    @property
    def packages(self) -> Path:
        return self.root.with_name("packages")

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))

    def env(self, **more: str) -> dict[str, str]:
        out = ("PYTEST_", "COV_", "COVERAGE", "PYTHON")
        env = {k: v for k, v in os.environ.items() if not k.startswith(out)}
        env |= {MARK: str(self.root), "PYTHONPATH": str(self.packages), "TERM": "dumb"}
        return env | {"PYTHONUNBUFFERED": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"} | more

    def start(self, *arguments: str, **env: str) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, *arguments],
            cwd=self.root,
            env=self.env(**env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        self.reader = threading.Thread(target=self._read, args=[self.process.stdout])
        self.reader.start()

    def _read(self, stream: BinaryIO) -> None:
        with stream:
            self.output.extend(line.decode().rstrip() for line in stream)

    @property
    def told(self) -> list[str]:
        """What `watch` itself has said, and how each session ended."""
        lines = [line.strip("= ").partition(" in ")[0] for line in self.output]
        return [line for line in lines if re.match(r"watch:|\d+ (passed|failed|error)", line)]

    def wait(self, *expected: str) -> None:
        """Wait until it waits, after exactly these lines since the last call."""
        wait_until(lambda: WAITING in self.told, f"waiting: {self.output}")
        end = self.told.index(WAITING)
        assert self.told[:end] == [*expected], self.output
        del self.output[: next(i for i, line in enumerate(self.output) if line == WAITING) + 1]

    def end(self, number: int) -> int:
        """Send a signal; return the exit code once nothing is left."""
        assert self.process is not None
        self.process.send_signal(number)
        code = self.process.wait(60)
        assert processes_with(MARK, str(self.root)) == []
        return code


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    found = Project(tmp_path / "project")
    found.write("pytest.ini", "[pytest]\n")
    found.write("../packages/torch.py", TORCH)
    yield found
    if found.process is not None:
        found.process.kill()
        found.process.wait()
        assert found.reader is not None
        found.reader.join()
    wait_until(lambda: not processes_with(MARK, str(found.root)), "everything ends")


def test_each_edit_starts_one_session(project: Project) -> None:
    project.write("helper.py", "VALUE = 1")
    project.write("test_a.py", "import helper\ndef test(): assert helper.VALUE == 1")
    project.write("test_b.py", "def test(): pass")
    project.start("-q", "-p", "no:cacheprovider")
    project.wait("2 passed")
    project.write("helper.py", "VALUE = 12")
    project.wait("watch: changed: helper.py", "1 failed, 1 passed")
    project.write("test_a.py", "import helper\ndef test(): assert helper.VALUE == 12")
    project.write("test_b.py", "def test(): pass\ndef test_2(): pass")
    project.wait("watch: changed: test_a.py, test_b.py", "3 passed")
    project.write("conftest.py", "import helper\nassert helper.VALUE == 0")
    project.wait("watch: changed: conftest.py")
    assert project.process is not None
    (project.root / "conftest.py").unlink()
    project.wait("watch: changed: conftest.py", "3 passed")
    project.write("test_b.py", "def test(:")
    project.wait("watch: changed: test_b.py", "1 error")
    assert project.end(signal.SIGINT) == 2


def test_what_no_session_reads_starts_none(project: Project) -> None:
    project.write("test_a.py", "def test(): pass")
    project.start("-q")
    project.wait("1 passed")
    names = (".pytest_megatron/a.py", ".git/a.py", "__pycache__/a.py", "venv/a.py", "run/a.py")
    project.write("venv/pyvenv.cfg", "")
    project.write("run/run.json", "{}")
    for name in (*names, "junit.xml", "out.log"):
        project.write(name, "")
    project.write("test_a.py", "def test(): assert 0")
    project.wait("watch: changed: test_a.py", "1 failed")
    assert project.end(signal.SIGTERM) == 1


def test_modules_are_loaded_once_and_anew_where_they_change(project: Project) -> None:
    text = "import pathlib; pathlib.Path('%s').open('a').write('x')"
    for name in ("../packages/library", "own"):
        project.write(f"{name}.py", text % Path(name).name)
    project.write("../packages/fails.py", "1 / 0")
    project.write("pytest.ini", "[pytest]\nmegatron_preload = library,own,fails,not_there\n")
    project.write("test_a.py", "import library, own\ndef test(): pass")
    path = f"{project.packages}{os.pathsep}{project.root}"
    project.start("-q", PYTHONPATH=path)
    fails = "watch: fails cannot be loaded: division by zero"
    project.wait("1 passed", fails)
    library, own = project.root / "library", project.root / "own"
    assert library.read_text() == own.read_text() == "xx"  # in the session, and for the next
    project.write("test_a.py", "import library, own\ndef test_2(): pass")
    project.wait("watch: changed: test_a.py", "1 passed")
    assert library.read_text() == own.read_text() == "xx"
    project.write("own.py", "VALUE = 1")
    project.wait("watch: changed: own.py", "1 passed", fails)
    assert library.read_text() == "xxxx"
    assert project.end(signal.SIGINT) == 0


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 2), (signal.SIGTERM, 2), (signal.SIGHUP, 2), (signal.SIGKILL, -9)],
    ids=["SIGINT", "SIGTERM", "SIGHUP", "SIGKILL"],
)
def test_a_signal_ends_the_session_and_its_ranks(project: Project, number: int, code: int) -> None:
    project.write("test_a.py", HANGS)
    project.start("--ranks", "2", "--device", "cpu")
    ranks = [project.root / f"began.{rank}" for rank in (0, 1)]
    wait_until(lambda: all(rank.exists() for rank in ranks), f"ranks run: {project.output}")
    assert project.process is not None
    send = os.killpg if number == signal.SIGINT else os.kill  # as a terminal does
    send(project.process.pid, number)
    assert project.process.wait(60) == code
    wait_until(lambda: not processes_with(MARK, str(project.root)), "everything ends")
    assert project.reader is not None
    project.reader.join()  # the output is read to its end
    assert WAITING not in project.told
    if number != signal.SIGKILL:
        assert "Interrupt" in "\n".join(project.output)

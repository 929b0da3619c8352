"""Suites of tests on a disk, and pytest runs of them on gangs: real processes, nothing left."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree as ET

import psutil
from forked_sessions import run_command, run_session

MARK = "GANG_SUITE"  # in the environment of every process of a suite
DEADLINE_S = 60.0
# A conftest with which ranks collect for themselves.
READS_RANK = """
    import os

    RANK = int(os.environ["RANK"])
"""
# A host without torch: where ranks collect for themselves, they load it before that if it is there.
WITHOUT_TORCH = {"PYTHONPATH": str(Path(__file__).parents[3] / "without_torch")}
_LINE = re.compile(r"^(\S+::\S+) ((?:SUB)?(?:PASSED|FAILED|SKIPPED|XFAIL|XPASS|ERROR)|RERUN)(.*)$")
_PROGRESS = re.compile(r"\s*\[ *\d+%\]$")


def wait_until(is_true: Callable[[], bool], what: str) -> None:
    """Wait for a handshake."""
    deadline = time.monotonic() + DEADLINE_S
    while not is_true():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {DEADLINE_S:g} s: {what}")
        time.sleep(0.01)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One pytest session that ended."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def lines(self) -> list[str]:
        """What `-v` prints for each report, in order, without the progress."""
        found = (_LINE.match(_PROGRESS.sub("", line)) for line in self.stdout.splitlines())
        return [f"{m[1]} {m[2]}{m[3]}".rstrip() for m in found if m is not None]

    @property
    def words(self) -> dict[str, str]:
        """Name of each test -> what `-v` said of it; subtests are told of by `lines` alone."""
        found = (line.partition(" ") for line in self.lines)
        pairs = [(node.rpartition("::")[2], text.split(" (")[0]) for node, _, text in found]
        words: dict[str, str] = {}
        for name, word in pairs:
            if not word.startswith("SUB"):
                words[name] = f"{words[name]} {word}" if name in words else word
        return words

    @property
    def summary(self) -> str:
        """The last line, without the time."""
        found = re.findall(r"^=+ (.*) in [\d.]+s.*=+$", self.stdout, re.MULTILINE)
        return str(found[-1]) if found else self.stdout


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One test as JUnit has it, but for times and what plain pytest does not have."""

    name: str
    kinds: tuple[str, ...]
    properties: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Suite:
    """A directory with test files.

    Attributes:
        has_torch: False runs it on a host without torch, in new processes which load no plugins
            but those that are typed.
        is_fresh: Whether `run` starts new processes; see `forked_sessions`.
    """

    root: Path
    has_torch: bool = True
    is_fresh: bool = False

    def write(self, **files: str) -> Suite:
        """Write files; `test_a="..."` is test_a.py."""
        for name, text in files.items():
            path = self.root / (f"{name}.py" if "." not in name else name)
            path.write_text(textwrap.dedent(text))
        return self

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "pytest", "-p", "megatron", *arguments]

    def env(self, **more: str) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "COV_"))}
        own = {} if self.has_torch else WITHOUT_TORCH | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        return kept | {MARK: str(self.root), "COLUMNS": "200"} | own | more

    def run(
        self, *arguments: str, env: Mapping[str, str] | None = None, command: Sequence[str] = ()
    ) -> Run:
        """Run pytest to its end; nothing of it may be left."""
        given = self.env(**(env or {}))
        if command:
            done = run_command([*command, *arguments], self.root, given)
        else:
            words = self.command(*arguments)[3:]
            is_fresh = self.is_fresh or not self.has_torch
            done = run_session(words, self.root, given, is_fresh=is_fresh)
        wait_until(lambda: not self.processes(), "no process is left")
        return Run(returncode=done.returncode, stdout=done.stdout, stderr=done.stderr)

    def start(self, *arguments: str, **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(*arguments),
            cwd=self.root,
            env=self.env(**env),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            process_group=0,
        )

    def junit(self, name: str = "junit.xml") -> list[Case]:
        """Return the test cases of a JUnit file."""
        return [
            Case(
                name=f"{case.get('classname')}::{case.get('name')}",
                kinds=tuple(
                    f"{child.tag} {child.get('type') or ''}".strip()
                    for child in case
                    if child.tag not in ("properties", "system-out", "system-err")
                ),
                properties=tuple(
                    (str(p.get("name")), str(p.get("value"))) for p in case.iter("property")
                ),
            )
            for case in ET.parse(self.root / name).iter("testcase")  # noqa: S314 - pytest's own
        ]

    def read(self, name: str) -> list[str]:
        """Return the lines that tests wrote to a file, or none."""
        path = self.root / name
        return path.read_text().splitlines() if path.exists() else []

    def processes(self) -> list[Sequence[str]]:
        """Command lines of what still runs of this suite."""
        found: list[Sequence[str]] = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == str(self.root):
                    found.append(process.cmdline())
            except psutil.Error:
                continue
        return found

"""Suites of tests on a disk, and pytest runs of them on gangs: real processes, nothing left."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from xml.etree import ElementTree as ET

import psutil
from forked_sessions import run_command, run_session
from labs import wait_until
from typing_extensions import override

from pytest_megatron.base.files import JsonValue

MARK = "GANG_SUITE"  # in the environment of every process of a suite
# A conftest with which ranks collect for themselves.
READS_RANK = """
    import os

    RANK = int(os.environ["RANK"])
"""
# A host without torch: where ranks collect for themselves, they load it before that if it is there.
WITHOUT_TORCH = {"PYTHONPATH": str(Path(__file__).parents[3] / "without_torch")}
_LINE = re.compile(r"^(\S+::\S+) ((?:SUB)?(?:PASSED|FAILED|SKIPPED|XFAIL|XPASS|ERROR)|RERUN)(.*)$")
_PROGRESS = re.compile(r"\s*\[ *\d+%\]$")


def processes_with(mark: str, value: str) -> list[Sequence[str]]:
    """Return the command lines of what runs with a variable."""
    found: list[Sequence[str]] = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(mark) == value:
                found.append(process.cmdline())
        except psutil.Error:
            continue
    return found


@dataclass(frozen=True, kw_only=True)
class Run:
    """One pytest session that ended.

    Attributes:
        directory: Its run directory, if it is a `RecordedSuite`'s; may not be there.
    """

    returncode: int
    stdout: str
    stderr: str
    directory: Path = Path()

    @property
    def printed(self) -> list[str]:
        return self.stdout.splitlines()

    @property
    def outcomes(self) -> dict[str, str]:
        """Pytest's word for each test, from its own short summary (`-rA`)."""
        found = re.findall(r"^(PASSED|FAILED|ERROR) \S+?::(\S+)", self.stdout, re.MULTILINE)
        return {name: word for word, name in found}

    @property
    def items(self) -> dict[str, dict[str, JsonValue]]:
        """What `run.json` says of each test, by its name."""
        kept = json.loads((self.directory / "run.json").read_text())
        return {node.rpartition("::")[2]: record for node, record in kept["items"].items()}

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

    def write(self, **files: str) -> Self:
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
        self,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        command: Sequence[str] = (),
        stdin: str = "",
    ) -> Run:
        """Run pytest to its end; nothing of it may be left."""
        given = self.env(**(env or {}))
        if command:
            done = run_command([*command, *arguments], self.root, given)
        else:
            words = self.command(*arguments)[3:]
            is_fresh = self.is_fresh or not self.has_torch
            done = run_session(words, self.root, given, is_fresh=is_fresh, stdin=stdin)
        wait_until(lambda: not self.processes(), "no process is left")
        return Run(
            returncode=done.returncode,
            stdout=done.stdout,
            stderr=done.stderr,
            directory=self.root / "run",
        )

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
        return processes_with(MARK, str(self.root))


class RecordedSuite(Suite):
    """A suite whose sessions have the directory `run` and print the outcome of every test."""

    @override
    def command(self, *arguments: str) -> list[str]:
        return super().command("-rA", "--run-dir", "run", *arguments)

    @override
    def run(
        self,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        command: Sequence[str] = (),
        stdin: str = "",
    ) -> Run:
        if not command:
            shutil.rmtree(self.root / "run", ignore_errors=True)
        return super().run(*arguments, env=env, command=command, stdin=stdin)

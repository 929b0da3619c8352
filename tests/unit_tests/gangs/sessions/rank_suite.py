"""Small suites of distributed tests on a disk, and pytest runs of them: real ranks."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import psutil
from forked_sessions import run_command, run_session

from pytest_megatron.base.files import JsonValue

MARK = "RANK_SUITE"  # in the environment of every process of a suite
DEADLINE_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Run:
    """One pytest session.

    Attributes:
        directory: The run directory; may not be there.
    """

    returncode: int
    stdout: str
    stderr: str
    directory: Path

    @property
    def lines(self) -> list[str]:
        return self.stdout.splitlines()

    @property
    def outcomes(self) -> dict[str, str]:
        """Pytest's word for each test, from its own short summary (`-rA`)."""
        found = re.findall(r"^(PASSED|FAILED|ERROR) \S+?::(\S+)", self.stdout, re.MULTILINE)
        return {name: word for word, name in found}

    @property
    def counts(self) -> str:
        """The last line, without the time."""
        return self.lines[-1].strip("= ").partition(" in ")[0]

    @property
    def items(self) -> dict[str, dict[str, JsonValue]]:
        """What `run.json` says of each test, by its name."""
        kept = json.loads((self.directory / "run.json").read_text())
        return {node.rpartition("::")[2]: record for node, record in kept["items"].items()}


@dataclass(frozen=True, kw_only=True)
class Suite:
    """A folder with test files.

    Attributes:
        is_fresh: Whether `run` starts new processes; see `forked_sessions`.
    """

    root: Path
    is_fresh: bool = False

    def write(self, name: str, text: str) -> Suite:
        (self.root / name).write_text(textwrap.dedent(text))
        return self

    def command(self, *arguments: str) -> list[str]:
        ours = ["-p", "megatron", "--run-dir", "run"]
        return [sys.executable, "-m", "pytest", "-rA", *ours, *arguments]

    def env(self, **more: str) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "COV_"))}
        return kept | {MARK: str(self.root), "COLUMNS": "120"} | more

    def run(self, *arguments: str, stdin: str = "", **env: str) -> Run:
        """Run pytest to its end, in a new run directory; nothing of it may be left."""
        shutil.rmtree(self.root / "run", ignore_errors=True)
        words = self.command(*arguments)[3:]
        given = self.env(**env)
        done = run_session(words, self.root, given, is_fresh=self.is_fresh, stdin=stdin)
        return self._ended(done)

    def execute(self, command: list[str], **env: str) -> Run:
        return self._ended(run_command(command, self.root, self.env(**env)))

    def _ended(self, done: subprocess.CompletedProcess[str]) -> Run:
        assert self.processes() == []
        return Run(
            returncode=done.returncode,
            stdout=done.stdout,
            stderr=done.stderr,
            directory=self.root / "run",
        )

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(*arguments),
            cwd=self.root,
            env=self.env(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def processes(self) -> list[list[str]]:
        """Command lines of what still runs of this suite."""
        found: list[list[str]] = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == str(self.root):
                    found.append(process.cmdline())
            except psutil.Error:
                continue
        return found

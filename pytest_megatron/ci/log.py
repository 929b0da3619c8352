"""The log of GitHub Actions or GitLab: annotations, folded sections, no commands but our own.

Lives in the controller alone. Whatever tests and trainings print passes pytest's terminal writer,
where lines that the CI system would take for commands of its own are altered.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, TextIO

import pytest
from _pytest._code.code import ExceptionRepr, ReprEntry

from pytest_megatron.base.text import (
    GITHUB_COMMANDS,
    plain,
    within_limit,
    workflow_command,
)
from pytest_megatron.session.state import FOLDING_LOG, RunSession

_MOST_CHARS = 4000  # of an annotation
# Long parts of a failure, which follow what they explain.
_FOLDED = re.compile(r"stack of |failure of ranks? |Captured |collectives, by |rank \d+$").match
# pytest-github-actions-annotate-failures, since 0.3 and before; it annotates failing calls.
_OTHERS = ("annotate_errors", "pytest_github_actions_annotate_failures")


class CiLog(Protocol):
    """The language of the log of a CI system.

    Attributes:
        commands: Matches the part of a command behind which a space makes it harmless.
        has_annotations: Whether a command can point to a line of a file.
    """

    commands: re.Pattern[str]
    has_annotations: bool

    def begin(self, title: str) -> str:
        """Return the line that begins a folded section."""

    def end(self) -> str:
        """Return the line that ends it."""


class GitHubLog:
    """Log groups of GitHub Actions."""

    commands = re.compile(GITHUB_COMMANDS)
    has_annotations = True

    def begin(self, title: str) -> str:
        """Return the command of a group; groups cannot be nested."""
        return workflow_command("group", {}, title)

    def end(self) -> str:
        """Return the command that ends the group."""
        return workflow_command("endgroup", {}, "")


class GitLabLog:
    """Source: docs.gitlab.com, CI/CD job logs, Custom collapsible sections."""

    commands = re.compile(r"section_(?:start|end)(?=:)")
    has_annotations = False

    def __init__(self) -> None:
        self._number = 0

    def begin(self, title: str) -> str:
        """Return the marker of a section that is collapsed at first."""
        self._number += 1
        return f"{self._marker('start')}[collapsed=true]\r\x1b[0K{plain(title)}"

    def end(self) -> str:
        """Return the marker of its end."""
        return f"{self._marker('end')}\r\x1b[0K"

    def _marker(self, which: str) -> str:
        return f"\x1b[0Ksection_{which}:{time.time():.0f}:pytest_megatron_{self._number}"


def log_of(env: Mapping[str, str]) -> CiLog | None:
    """Return the log that a session with this environment writes to; None on a terminal."""
    if env.get("GITHUB_ACTIONS") == "true":
        return GitHubLog()
    return GitLabLog() if env.get("GITLAB_CI") == "true" else None


class HarmlessFile:
    """A text file in whose lines commands have no effect, except those written to `file`."""

    def __init__(self, file: TextIO, commands: re.Pattern[str]) -> None:
        self.file = file
        self._commands = commands
        self._line = ""  # as far as it was written

    def __getattr__(self, name: str) -> object:
        return getattr(self.file, name)

    def write(self, text: str) -> int:
        """Write text; a command may have begun in an earlier one."""
        shown = self._commands.sub(r"\g<0> ", self._line + text)
        written = self.file.write(shown[len(self._line) :])
        self._line = re.split(r"[\r\n]", shown)[-1]
        return written

    def write_command(self, command: str) -> None:
        """Write a command of our own, in a line of its own."""
        before = "\n" if self._line else ""
        self.file.write(f"{before}{command}\n")
        self.file.flush()
        self._line = ""


class CiLogPlugin:
    """Annotates failures and folds what is long, in the log of a CI system."""

    def __init__(self, config: pytest.Config, log: CiLog) -> None:
        self._config = config
        self._log = log
        self._file: HarmlessFile | None = None
        self._is_folding = False
        self._annotations: list[str] = []
        self._attach()

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self) -> None:
        """Attach to the terminal, which may be made after this plugin."""
        self._attach()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the failure of a phase."""
        has_other = any(map(self._config.pluginmanager.has_plugin, _OTHERS))
        if report.failed and not (has_other and report.when == "call"):
            place = report.location[0], (report.location[1] or 0) + 1
            self._annotate(report.longrepr, place, report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note an error of the collection."""
        if report.failed:
            self._annotate(report.longrepr, (report.nodeid.partition("::")[0], 1), report.nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_terminal_summary(self) -> None:
        """End the last section of the failures."""
        self.unfold()

    def pytest_unconfigure(self) -> None:
        """Write the annotations below everything else."""
        self.unfold()
        for line in within_limit(self._annotations, "GitHub shows ten of a step; see its log"):
            self._command(line)
        self._annotations = []

    def fold(self, title: str) -> None:
        """Begin a folded section, unless there is one."""
        if not self._is_folding:
            self._is_folding = True
            self._command(self._log.begin(title))

    def unfold(self) -> None:
        """End the folded section, if there is one."""
        if self._is_folding:
            self._is_folding = False
            self._command(self._log.end())

    def _attach(self) -> None:
        """Have all that pytest writes pass through here."""
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if reporter is None or self._file is not None:
            return
        writer = reporter._tw
        writer._file = self._file = HarmlessFile(writer._file, self._log.commands)
        write_sep = writer.sep

        def sep(
            sepchar: str, title: str | None = None, width: int | None = None, **markup: bool
        ) -> None:
            """Write a separator; one that begins a long part of a report begins a fold."""
            self.unfold()
            if title is not None and _FOLDED(title):
                self.fold(title)
            else:
                write_sep(sepchar, title, width, **markup)

        writer.sep = sep

    def _command(self, line: str) -> None:
        """Write a command of the CI system as a line of its own."""
        if self._file is not None:
            writer = self._config.get_terminal_writer()
            if writer.width_of_current_line:
                writer.line()
            self._file.write_command(line)

    def _annotate(self, longrepr: object, place: tuple[str, int], node_id: str) -> None:
        """Annotate the line at which a test or a collection failed."""
        if not self._log.has_annotations:
            return
        message = str(longrepr)
        if isinstance(longrepr, ExceptionRepr):
            entry = longrepr.reprtraceback.reprentries[0]
            found = entry.reprfileloc if isinstance(entry, ReprEntry) else None
            if found is not None:
                place = found.path, found.lineno
            if longrepr.reprcrash is not None and (found is not None or longrepr.sections):
                ranks = [text for name, text, _ in longrepr.sections if name == "ranks"]
                message = "\n".join([longrepr.reprcrash.message, *ranks])
        properties = {"file": self._in_workspace(place[0]), "line": place[1], "title": node_id}
        self._annotations.append(workflow_command("error", properties, plain(message, _MOST_CHARS)))

    def _in_workspace(self, path: str) -> str:
        """Return a path as GitHub knows it, relative to the checkout."""
        found = self._config.rootpath / path
        if not found.exists():  # of a traceback
            found = self._config.invocation_params.dir / path
        workspace = Path(os.environ.get("GITHUB_WORKSPACE") or self._config.rootpath)
        is_below = found.is_relative_to(workspace)
        return str(found.relative_to(workspace) if is_below else path)


def register_ci_log(config: pytest.Config, _: RunSession) -> None:
    """Write as the CI system reads it, where one runs this session, once."""
    log = log_of(os.environ)
    if log is not None and not config.pluginmanager.has_plugin(FOLDING_LOG):
        config.pluginmanager.register(CiLogPlugin(config, log), FOLDING_LOG)

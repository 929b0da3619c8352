"""State that every plugin of one pytest session shares: options, run directory, arguments."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import json
import os
import re
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_megatron.base.project import ProjectConfig, load_config
from pytest_megatron.features import ExtensionPoint
from pytest_megatron.runs.environment import SessionFacts, gather_facts
from pytest_megatron.runs.layout import (
    HISTORY_FILE,
    OWN_DIR,
    RUN_FILE,
    RUNS_DIR,
    make_own_dir,
    make_results_dir,
)
from pytest_megatron.session.options import Options, read_options, usage_errors

if TYPE_CHECKING:
    from pytest_megatron.runs.redact import Redactor
    from pytest_megatron.triage.signatures import Table


_ARGUMENTS_KEY = "megatron_arguments"
NOTE_PREFIX = ".progress-"  # the name of a worker follows
_LOCK = ".lock"  # in a run directory that the user named
_RUN_DIR_KEY = "megatron_run_dir"
_RUN_NAME = pytest.StashKey[str]()
IS_WORKLOAD = pytest.StashKey[bool]()  # in the stash of an item that is one


class RunSession:
    """One session, in the controller or in a worker of pytest-xdist.

    Attributes:
        root: The project: recipes, cases and goldens are found from here.
        options: Values of the options.
        run_dir: Made when the first workload starts; a worker has the controller's.
        is_worker: Whether this is a worker of pytest-xdist.
        is_open: Whether the run directory was made.
        warned: Warnings about workloads that were shown, and are not shown again.
        directory: Where pytest was started.
        stash: What features keep for the session.
    """

    def __init__(self, config: pytest.Config, options: Options) -> None:
        """Read the configuration; starts and writes nothing."""
        self.directory = config.invocation_params.dir
        self.root = config.rootpath
        self.options = options
        worker: dict[str, str] | None = getattr(config, "workerinput", None)
        self.is_worker = worker is not None
        self._worker_id = None if worker is None else worker["workerid"]
        self._num_workers = 1 if worker is None else int(worker["workercount"])
        self.warned: set[str] = set()
        self.stash = pytest.Stash()
        self.is_open = False
        self._is_ours = False
        self._claimed_by: int | None = None  # a process
        self._made_run_dir = False
        if worker is not None:
            self.run_dir = Path(worker[_RUN_DIR_KEY])
            self._typed: list[str] = json.loads(worker[_ARGUMENTS_KEY])
        else:
            self.run_dir = self._new_run_dir(config)
            self._typed = [str(argument) for argument in config.invocation_params.args]

    @property
    def facts(self) -> SessionFacts:
        """Facts about host and environment of this session."""
        return gather_facts(self.root)

    @functools.cached_property
    def project(self) -> ProjectConfig:
        """The project's settings.

        Raises:
            pytest.UsageError: They are wrong.
        """
        with usage_errors():
            return load_config(self.root)

    @functools.cached_property
    def redactor(self) -> Redactor:
        """Redactor for the secrets of this process and of the command line.

        Raises:
            pytest.UsageError: The project's settings are wrong.
        """
        from pytest_megatron.runs.redact import Redactor  # noqa: PLC0415  where it is needed

        return Redactor.of(os.environ, self._typed, self.project.secret_names)

    @property
    def arguments(self) -> list[str]:
        """Arguments of `pytest`, without secrets."""
        return self.redactor.words(self._typed)

    @functools.cached_property
    def table(self) -> Table:
        """The signatures, with those of the project and the user.

        Raises:
            pytest.UsageError: A file of theirs cannot be read.
        """
        from pytest_megatron.triage.signatures import load_table  # noqa: PLC0415  takes 60 ms

        with usage_errors():
            return load_table(self.signature_files)

    @property
    def signature_files(self) -> tuple[Path, ...]:
        """The files of signatures of the project and the user.

        Raises:
            pytest.UsageError: The project's settings are wrong.
        """
        typed = (Path(self.directory, path) for path in self.options.signatures)
        return (*self.project.signature_files, *typed)

    @functools.cached_property
    def retries(self) -> RetryBudget:
        """Further attempts that this process may take; workers share what the run may have."""
        number = int(re.sub(r"\D", "", self._worker_id or "") or 0)  # users may name their workers
        return RetryBudget(self.options.max_retries, number, self._num_workers)

    @property
    def ranks_dir(self) -> str:
        """Name of the directory in the run directory that holds logs of gangs."""
        return "ranks" if self._worker_id is None else f"ranks-{self._worker_id}"

    @property
    def progress_note(self) -> Path | None:
        """File in which a worker notes how far its training is; None in the controller."""
        return None if self._worker_id is None else self.run_dir / f"{NOTE_PREFIX}{self._worker_id}"

    @property
    def history_file(self) -> Path:
        """The file of past outcomes; the project's own where `megatron_history` names none."""
        chosen = self.options.history
        return self.root / (f"{OWN_DIR}/{HISTORY_FILE}" if chosen in ("", "off") else chosen)

    def open_run_dir(self) -> Path:
        """Make the run directory if it is not there yet, and return it.

        Raises:
            pytest.UsageError: It cannot be made.
        """
        if not self.is_open:
            try:
                self.run_dir.mkdir(parents=True, exist_ok=True)
                if self.options.run_dir is None:
                    make_own_dir(self.root)
                    link_latest(self.run_dir)
            except OSError as error:
                raise pytest.UsageError(self.cannot_write(error)) from None
            self.is_open = True
        return self.run_dir

    def refuse_used_run_dir(self) -> None:
        """Make sure that no file of another run can be taken for one of this.

        Raises:
            pytest.UsageError: The run directory holds an earlier run.
        """
        if self._is_ours:
            return
        where = self.shorten(str(self.run_dir))
        if (self.run_dir / RUN_FILE).exists():
            raise pytest.UsageError(f"--run-dir: {where} holds an earlier run; give another")
        if self.run_dir.exists() and not self.run_dir.is_dir():
            raise pytest.UsageError(f"--run-dir: {where} is no directory; give another")
        if self.options.run_dir is not None:
            self._claim_run_dir(where)
        self._is_ours = True  # from now on, what is there is of this run

    def _claim_run_dir(self, where: str) -> None:
        """Keep other sessions out of the run directory while this one lives.

        Raises:
            pytest.UsageError: Another session runs in it.
        """
        self._made_run_dir = not self.run_dir.exists()
        try:
            make_results_dir(self.run_dir)
            (self.run_dir / _LOCK).touch(exist_ok=False)
        except FileExistsError:
            raise pytest.UsageError(
                f"--run-dir: another session runs in {where}, or was killed there; "
                f"give each its own"
            ) from None
        except OSError:
            return  # who writes there names what is wrong
        self._claimed_by = os.getpid()

    def take_claim_of(self, ahead: RunSession) -> None:
        """Take over the claim of an earlier session of this process to the same run directory."""
        if ahead.run_dir == self.run_dir:
            self._is_ours = ahead._is_ours
            self._claimed_by, self._made_run_dir = ahead._claimed_by, ahead._made_run_dir

    def release_run_dir(self) -> None:
        """Let go of the run directory; one in which nothing was written goes as well."""
        if self._claimed_by != os.getpid():  # a rank has a copy
            return
        (self.run_dir / _LOCK).unlink(missing_ok=True)
        if self._made_run_dir and not any(self.run_dir.glob("[!.]*")):
            (self.run_dir / ".gitignore").unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # something else is there, or it is gone
                self.run_dir.rmdir()

    @property
    def has_results(self) -> bool:
        """True if the run directory was opened, or holds more than the files that claim it."""
        if not self.run_dir.is_dir():
            return False
        return self.is_open or any(
            path.name not in (_LOCK, ".gitignore") for path in self.run_dir.iterdir()
        )

    @property
    def where(self) -> str:
        """The run directory, as the user would type it here."""
        return self.shorten(str(self.run_dir))

    def worker_input(self) -> dict[str, str]:
        """Return the input for a worker of pytest-xdist."""
        return {_RUN_DIR_KEY: str(self.run_dir), _ARGUMENTS_KEY: json.dumps(self._typed)}

    def shorten(self, text: str) -> str:
        """Name files as the user would type them here."""
        return text.replace(f"{self.directory}{os.sep}", "")

    def cannot_write(self, error: OSError) -> str:
        """Return the message for a file that could not be written."""
        where = error.filename or self.run_dir
        return f"{where}: {error.strerror}; make room, or give another --run-dir"

    def _new_run_dir(self, config: pytest.Config) -> Path:
        """Return the run directory of this session."""
        if self.options.run_dir is not None:
            chosen = Path(self.directory, self.options.run_dir)
        else:
            name = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
            chosen = self.root / RUNS_DIR / config.stash.setdefault(_RUN_NAME, name)
        # Once, for all: containers and other machines see it under its real path alone.
        return chosen.resolve()


class RetryBudget:
    """Counts the further attempts that one process may still take for its items."""

    def __init__(self, of_run: int, number: int = 0, num_processes: int = 1) -> None:
        """Begin with none taken.

        Args:
            of_run: Further attempts of all items of the run together.
            number: Of the process, from 0.
            num_processes: How many share what the run may have.
        """
        self._left = of_run // num_processes + (number < of_run % num_processes)
        own = "" if num_processes == 1 else f"{self._left} for this worker of "
        self._used_up = f"{own}the run's {of_run} further attempts are used up"

    def claim(self) -> str | None:
        """Take one further attempt; return why there is none, or None."""
        if not self._left:
            return self._used_up
        self._left -= 1
        return None


_SESSION = pytest.StashKey[RunSession]()
_AHEAD = pytest.StashKey[RunSession]()


def session_ahead(config: pytest.Config) -> RunSession:
    """Return a session of the options that are known before conftest files are loaded.

    `session_of` makes the one that runs, which takes over the claim to the run directory.
    """
    session = config.stash[_AHEAD] = RunSession(config, read_options(config))
    config.add_cleanup(session.release_run_dir)
    return session


def session_of(config: pytest.Config) -> RunSession:
    """Return the one session of a configuration: all plugins share its run directory."""
    if _SESSION not in config.stash:
        session = config.stash[_SESSION] = RunSession(config, read_options(config))
        config.add_cleanup(session.release_run_dir)
        if ahead := config.stash.get(_AHEAD, None):
            session.take_claim_of(ahead)
    return config.stash[_SESSION]


def is_run_dir_open(config: pytest.Config) -> bool:
    """Return whether the session has made its run directory."""
    return _SESSION in config.stash and config.stash[_SESSION].is_open


def write_line(config: pytest.Config, line: str) -> None:
    """Write a line to the terminal, if this process has one."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        reporter.write_line(line)


def show_no_stacks() -> None:
    """Cancel `faulthandler_timeout` in this process, which only waits for others.

    Call it in `pytest_runtest_protocol`, once its wrappers have begun.
    """
    faulthandler.cancel_dump_traceback_later()


def link_latest(run_dir: Path) -> None:
    """Point `latest` beside the run at it; the link is replaced, never missing."""
    new = run_dir.parent / f".latest-{run_dir.name}-{os.getpid()}"  # workers do this as well
    new.unlink(missing_ok=True)
    new.symlink_to(run_dir.name)
    new.replace(run_dir.parent / "latest")


_REPORTERS: ExtensionPoint[Callable[[pytest.Config, RunSession], None]] = ExtensionPoint("reporter")


def register_reporters(config: pytest.Config, session: RunSession) -> None:
    """Register those of all features; each registers itself once."""
    for register in _REPORTERS.all():
        register(config, session)

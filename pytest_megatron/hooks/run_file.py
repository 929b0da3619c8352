"""`run.json` of a session, which the roles for workloads and for distributed tests share."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from pytest_megatron.files import JsonValue, write_json_atomically
from pytest_megatron.hooks.session import RunSession, link_latest
from pytest_megatron.launch.facts import utc_now


class RunFile:
    """`run.json`, of workloads and distributed tests alike.

    Attributes:
        problem: Why the file lacks something, or None.
    """

    def __init__(self, session: RunSession) -> None:
        self._session = session
        self._records: dict[str, JsonValue] = {}
        self._started = utc_now()
        self._end: dict[str, JsonValue] = {"ended": None, "exit_code": None}
        self.problem: str | None = None

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None]:
        """Say how the run ended, after all others had a say in it."""
        yield
        self._end = {"ended": utc_now(), "exit_code": int(session.exitstatus)}
        if self._records:
            self.write()

    def keep(self, node_id: str, record: JsonValue) -> None:
        """Take the record of an item; the next `write` has it."""
        self._records[node_id] = record

    def write(self) -> None:
        """Write what is known, so that a run that is killed still says what it did."""
        try:
            self._write()
            self.problem = None
        except OSError as error:  # the disk is full; the terminal still says what it was
            self.problem = self._session.cannot_write(error)

    def _write(self) -> None:
        run_dir = self._session.run_dir
        if not run_dir.is_dir():
            return  # nothing could be started
        run: dict[str, JsonValue] = {
            "schema": 1,
            "started": self._started,
            "updated": utc_now(),
            **self._end,
            "arguments": list[JsonValue](self._session.arguments),
            **self._session.facts.as_json(),
            "items": self._records,
        }
        write_json_atomically(run_dir / "run.json", run)
        if self._session.options.run_dir is None:
            link_latest(run_dir)


_RUN_FILE = pytest.StashKey[RunFile]()


def run_file_of(config: pytest.Config, session: RunSession) -> RunFile:
    """Return the one `run.json` of a session, which all roles share."""
    if _RUN_FILE not in config.stash:
        config.stash[_RUN_FILE] = RunFile(session)
        config.pluginmanager.register(config.stash[_RUN_FILE], "megatron-run-file")
    return config.stash[_RUN_FILE]

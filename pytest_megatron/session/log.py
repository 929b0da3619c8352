"""The log of a session: what the tool decided and why, through `logging`, and in the run directory.

Rooms log to `pytest_megatron.<room>`. pytest shows the records with `--log-cli-level=INFO`; the run
directory keeps them in `megatron.log`.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from typing_extensions import override

from pytest_megatron.rooms import ROOMS

FILE_NAME = "megatron.log"
_LOGGERS = [logging.getLogger(f"pytest_megatron.{room}") for room in ROOMS]
_FORMAT = logging.Formatter("%(asctime)s %(name)s: %(message)s")


class SessionLog(logging.Filter):
    """Writes records into the run directory once it is there; until then it keeps them.

    It is a filter, and not a handler, so that pytest does not take the records for output of a
    test where the root logger's level is higher.
    """

    def __init__(self, run_dir: Path) -> None:
        super().__init__()
        self._run_dir = run_dir
        self._kept: list[str] = []

    def begin(self) -> None:
        """Keep the log records of all rooms from here on."""
        for logger in _LOGGERS:
            logger.setLevel(logging.INFO)
            logger.addFilter(self)

    def end(self) -> None:
        """Keep no more log records."""
        self._write()
        for logger in _LOGGERS:
            logger.setLevel(logging.NOTSET)
            logger.removeFilter(self)

    @override
    def filter(self, record: logging.LogRecord) -> bool:
        """Keep a record; return whether the root logger's level lets it through."""
        self._kept.append(f"{_FORMAT.format(record)}\n")
        self._write()
        return logging.getLogger().isEnabledFor(record.levelno)

    def _write(self) -> None:
        """Append what is kept to the log of the run."""
        if not self._kept or not self._run_dir.is_dir():
            return
        # Opened for each record: ranks are forks of this process. Others report a full disk.
        with (
            contextlib.suppress(OSError),
            (self._run_dir / FILE_NAME).open("a", encoding="utf-8") as file,
        ):
            file.write("".join(self._kept))
        self._kept.clear()

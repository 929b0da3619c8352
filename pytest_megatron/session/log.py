"""The log of a session: what the tool decided and why, through `logging`, and in the run directory.

Rooms log to `pytest_megatron.<room>`. pytest shows the records with `--log-cli-level=INFO`; the run
directory keeps them in `megatron.log`.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from typing_extensions import override

FILE_NAME = "megatron.log"
_ROOT = "pytest_megatron"


class SessionLog(logging.Handler):
    """Writes records into the run directory once it is there; until then it keeps them."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s"))
        self._path: Path | None = None
        self._kept: list[str] = []

    def begin(self) -> None:
        """Take the records of all rooms."""
        logger = logging.getLogger(_ROOT)
        logger.setLevel(logging.INFO)
        logger.propagate = False  # `emit` passes on what the root logger is to have
        logger.addHandler(self)

    def end(self) -> None:
        """Take no more records."""
        logger = logging.getLogger(_ROOT)
        logger.removeHandler(self)
        logger.propagate = True

    def write_to(self, run_dir: Path) -> None:
        """Write the records from now on, and those that were kept."""
        self._path = run_dir / FILE_NAME
        kept, self._kept = self._kept, []
        self._write(kept)

    @override
    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record; pass it on where the root logger's level lets it through."""
        line = self.format(record)
        if self._path is None:
            self._kept.append(line)
        else:
            self._write([line])
        root = logging.getLogger()
        if root.isEnabledFor(record.levelno):
            root.handle(record)

    def _write(self, lines: list[str]) -> None:
        assert self._path is not None
        # Opened for each record: ranks are forks of this process. Others report a full disk.
        with contextlib.suppress(OSError), self._path.open("a", encoding="utf-8") as file:
            file.write("".join(f"{line}\n" for line in lines))

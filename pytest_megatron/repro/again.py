"""Runs pytest once more and reads what it left (effects: processes, files)."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_megatron.errors import ReproError
from pytest_megatron.launch.layout import RUN_FILE
from pytest_megatron.repro.choose import Chosen
from pytest_megatron.repro.command import SEEDED, Again, Wishes, command_for
from pytest_megatron.repro.outcome import ReproOutcome, judge_again
from pytest_megatron.repro.recorded import RecordedItem, read_run

_OF_PYTEST = ("PYTEST_ADDOPTS", "PYTEST_CURRENT_TEST", "PYTEST_XDIST_WORKER")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Where items are done again.

    Attributes:
        root: The project; pytest runs in it.
        scratch: Directory of this reproduction: what was unpacked, and new run directories.
    """

    root: Path
    scratch: Path

    def command(
        self, chosen: Chosen, wishes: Wishes, before: Sequence[str], name: str = "run"
    ) -> Again:
        """Return the command whose results go to a directory of that name."""
        target = self.scratch / name
        inside = target.is_relative_to(self.root)
        return command_for(
            chosen,
            wishes,
            before,
            python=sys.executable,
            seeded=[name for name in SEEDED if importlib.util.find_spec(name) is not None],
            run_dir=str(target.relative_to(self.root) if inside else target),
        )

    def run(
        self, chosen: Chosen, again: Again, name: str = "run", *, is_quiet: bool
    ) -> ReproOutcome:
        """Run it to its end and judge what it left.

        Args:
            chosen: The item.
            again: From `command`, with the same `name`.
            name: Of the directory for results.
            is_quiet: Whether what pytest prints goes into a file beside that directory.

        Raises:
            KeyboardInterrupt: Ctrl-C, once pytest has ended its processes.
            ReproError: pytest cannot be started.
        """
        log = self.scratch / f"{name}.log"
        self.scratch.mkdir(parents=True, exist_ok=True)
        try:
            with log.open("wb") if is_quiet else open(os.devnull, "wb") as file:  # noqa: PTH123
                process = subprocess.Popen(
                    again.argv,
                    cwd=self.root,
                    env=self.env(again),
                    stdout=file if is_quiet else None,
                    stderr=subprocess.STDOUT if is_quiet else None,
                )
        except OSError as error:
            raise ReproError(again.argv[0], f"cannot be started: {error.strerror}") from error
        try:
            returncode = process.wait()
        except KeyboardInterrupt:  # pytest has it too, and needs a moment to end its ranks
            process.wait()
            raise
        return judge_again(chosen, self._item(chosen.node_id, name), returncode)

    def env(self, again: Again) -> dict[str, str]:
        """Return the whole environment of what is started."""
        own = {k: v for k, v in os.environ.items() if k not in _OF_PYTEST}
        return {**own, **again.env}

    def _item(self, node_id: str, name: str) -> RecordedItem | None:
        path = self.scratch / name / RUN_FILE
        return read_run(path).items.get(node_id) if path.is_file() else None

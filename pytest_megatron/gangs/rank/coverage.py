"""Coverage of ranks, with the settings of coverage.py in the controller (effects).

A forked process stops the inherited measurement and writes to a file of its own; at the end the
controller merges these files into its data, before reports are made.
"""

from __future__ import annotations

import os
import posix
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from pytest_megatron.base.files import JsonValue
from pytest_megatron.process.originals import time

if TYPE_CHECKING:
    from coverage import Coverage

_SILENT = [  # warnings that hold for a single rank; those of the controller hold for all
    "already-imported",
    "include-ignored",
    "module-not-imported",
    "module-not-measured",
    "module-not-python",
    "no-data-collected",
    "no-sysmon",
]
_SAVE_EVERY_S = 1.0  # the most that is lost when a gang is killed
_OWN = ("data_file", "disable_warnings", "parallel", "patch")  # settings that ranks do not share
_EXIT = "_exit"


def settings_of_running() -> dict[str, JsonValue]:
    """Return the settings of the running coverage.py for ranks; empty if none runs."""
    current = _running()
    if current is None:
        return {}
    config: dict[str, JsonValue] = vars(current.config)
    settings = {k: v for k, v in config.items() if not k.startswith("_") and k not in _OWN}
    patches = cast("list[str]", config.get("patch", []))  # releases differ
    return {**settings, "patch": [name for name in patches if name == _EXIT]}


@dataclass(slots=True)
class Measurement:
    """Coverage of this process."""

    _coverage: Coverage
    _next_at: float = 0.0

    def end_test(self, *, is_last: bool) -> None:
        """Save from time to time, and after the last test: a gang of one test is not closed."""
        if is_last or time.monotonic() >= self._next_at:
            self._coverage.save()
            self._next_at = time.monotonic() + _SAVE_EVERY_S

    def save(self) -> None:
        """Stop measuring and write the data."""
        self._coverage.stop()
        self._coverage.save()


def start(settings: Mapping[str, JsonValue], data_file: str) -> Measurement | None:
    """Measure this process from now on; return None if coverage is off.

    Args:
        settings: From `settings_of_running`.
        data_file: File for the data.
    """
    if not settings:
        return None
    from coverage import Coverage  # an extra that only those have who measure

    leave_running()
    Path(data_file).parent.mkdir(parents=True, exist_ok=True)
    coverage = Coverage(data_file=data_file, config_file=False)
    vars(coverage.config).update(settings)
    coverage.set_option("run:parallel", value=False)
    coverage.set_option("run:disable_warnings", _SILENT)
    coverage.start()
    return Measurement(coverage)


def leave_running() -> None:
    """Stop the measurement that a fork inherited, without writing to its data file."""
    if os._exit is not posix._exit:  # coverage's patch
        os._exit = posix._exit  # would save it
    while (inherited := _running()) is not None:
        inherited.stop()


def merge_into_running(directory: Path) -> list[str]:
    """Merge the files of ranks into the running coverage.py and delete them; return errors."""
    current = _running()
    if current is None or not directory.is_dir():
        return []
    from coverage import CoverageData
    from coverage.exceptions import CoverageException

    problems = []
    for path in sorted(directory.iterdir()):
        found = CoverageData(basename=str(path))
        try:
            found.read()
            current.get_data().update(found)
        except CoverageException as error:  # a rank was killed while it wrote
            problems.append(f"{path.name}: {error}")
        finally:
            found.close()
        path.unlink()
    directory.rmdir()
    return problems


def _running() -> Coverage | None:
    coverage = sys.modules.get("coverage")
    return None if coverage is None else cast("Coverage | None", coverage.Coverage.current())

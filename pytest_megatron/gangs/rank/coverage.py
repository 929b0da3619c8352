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
    from coverage.types import TConfigValueIn

_OPTIONS = (
    "branch",
    "concurrency",
    "context",
    "core",
    "cover_pylib",
    "dynamic_context",
    "include",
    "omit",
    "plugins",
    "relative_files",
    "sigterm",
    "source",
    "source_dirs",
    "source_pkgs",
    "timid",
)
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
_CONFIG_FILE = "config_file"
_EXIT = "_exit"


def settings_of_running() -> dict[str, JsonValue]:
    """Return the settings of the running coverage.py for ranks; empty if none runs."""
    current = _running()
    if current is None:
        return {}
    settings: dict[str, JsonValue] = {
        _CONFIG_FILE: current.config.config_file,
        "patch": [p for p in getattr(current.config, "patch", ()) if p == _EXIT],
    }
    for name in _OPTIONS:
        if hasattr(current.config, name):  # releases differ
            settings[name] = cast("JsonValue", current.get_option(f"run:{name}"))
    return settings


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
    config_file = cast("str | None", settings[_CONFIG_FILE])
    Path(data_file).parent.mkdir(parents=True, exist_ok=True)
    coverage = Coverage(data_file=data_file, config_file=config_file or False)
    coverage.set_option("run:parallel", value=False)
    coverage.set_option("run:disable_warnings", _SILENT)
    for name, value in settings.items():
        if name != _CONFIG_FILE:
            coverage.set_option(f"run:{name}", cast("TConfigValueIn", value))
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

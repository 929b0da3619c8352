"""Runs a case's BEFORE_SCRIPT and AFTER_SCRIPT: under bash, in processes of their own.

Nothing that a script assigns can reach the verdict; what the first one exports reaches the
training.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pytest_megatron.base.files import write_text_atomically
from pytest_megatron.process.guarded import GuardedProcess

_GRACE_S = 5.0
# Megatron-LM evaluates the text in a shell with these settings.
_HEAD = "set -euo pipefail\n"
_ENV_FILE = "PYTEST_MEGATRON_ENV_FILE"
_TAIL = f'\nenv -0 > "${_ENV_FILE}"\n'
_NOT_PASSED_ON = frozenset((_ENV_FILE, "BASHOPTS", "SHELLOPTS", "SHLVL", "_"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptEnd:
    """Result of a script.

    Attributes:
        key: `BEFORE_SCRIPT` or `AFTER_SCRIPT`.
        returncode: None where the time limit ended it.
        log: What it printed.
        env: The environment that it leaves to the training.
    """

    key: str
    returncode: int | None
    log: Path
    env: Mapping[str, str]

    @property
    def is_clean(self) -> bool:
        """True if it ended with exit code 0."""
        return self.returncode == 0


def run_script(
    key: str, text: str, path: Path, env: Mapping[str, str], cwd: Path, *, deadline: float
) -> ScriptEnd:
    """Run a script to its end.

    Args:
        key: As `ScriptEnd.key`.
        text: What the case holds.
        path: The file to put it in; its output and its environment go beside it.
        env: All of its environment.
        cwd: The project's root.
        deadline: On the monotonic clock.

    Raises:
        OSError: The file cannot be written.
        LaunchError: bash cannot be started.
    """
    log, left = path.with_suffix(".log"), path.with_suffix(".env")
    write_text_atomically(path, _HEAD + text + _TAIL)
    returncode = None
    with GuardedProcess(
        ["bash", str(path)],
        env={**env, _ENV_FILE: str(left)},
        cwd=cwd,
        output=log,
        grace_s=_GRACE_S,
    ) as process:
        ended = process.poll(max(0.0, deadline - time.monotonic()))
        if ended is not None:
            returncode = ended.returncode
    return ScriptEnd(key=key, returncode=returncode, log=log, env=_left(left, env))


def _left(file: Path, env: Mapping[str, str]) -> Mapping[str, str]:
    """Return the environment that a script left, and take the file away: it may hold secrets."""
    if not file.exists():  # it said `exit 0` by itself, or failed
        return env
    pairs = [line.partition("=") for line in file.read_text().split("\0") if line]
    file.unlink()
    return {name: value for name, _, value in pairs if name not in _NOT_PASSED_ON}

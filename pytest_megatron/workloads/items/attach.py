"""Takes over a run whose controller is gone: pytest is given again what that one was given.

Runs before conftest files are loaded, and only where `--attach` is typed.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from pytest_megatron.errors import RunError
from pytest_megatron.runs.layout import RUN_FILE
from pytest_megatron.runs.record import RecordedRun, read_run
from pytest_megatron.runs.redact import REDACTED
from pytest_megatron.session.state import RECORDED

# Arguments that pytest reads before it loads plugins.
_OVERRIDING = ("-o", "--override-ini")
_TOO_EARLY = ("-c", "--config-file", "--rootdir", "--confcutdir", *_OVERRIDING)


def add_recorded(early_config: pytest.Config, arguments: list[str], run: str) -> None:
    """Put the arguments of a run before those that are typed now.

    Args:
        early_config: Configuration of the session that takes over.
        arguments: Changed in place: the options of ini files, then what is typed.
        run: The run directory, from where the user is.

    Raises:
        pytest.UsageError: There is no such run, it ended, or its words cannot be used again.
    """
    directory = early_config.invocation_params.dir
    recorded = _recorded(Path(directory, run), run)
    _refuse_other_directory(early_config, recorded.directory, run)
    told = list(recorded.arguments or ())
    typed = [str(word) for word in early_config.invocation_params.args]
    for word, after in itertools.zip_longest(told, told[1:], fillvalue=""):
        if REDACTED in word:
            raise pytest.UsageError(
                f"--attach: {run} was started with a secret on its command line ({word}), which "
                f"is not kept; give the option in a variable or in an ini file next time"
            )
        name, _, value = word.partition("=")
        if name in _OVERRIDING and (value or after).startswith("megatron_"):
            continue  # read by us
        if name in _TOO_EARLY and not any(t.partition("=")[0] == name for t in typed):
            raise pytest.UsageError(
                f"--attach: {run} was started with {name}, which pytest reads before it knows of "
                f"--attach; type it again beside --attach"
            )
    early_config.pluginmanager.consider_preparse(told, exclude_only=False)  # -p NAME
    place = len(arguments) - len(typed)
    arguments[place:place] = told
    if recorded.positional is not None:  # whose conftest files are loaded first
        namespace = early_config.known_args_namespace
        namespace.file_or_dir = [*recorded.positional, *(namespace.file_or_dir or ())]
    early_config.stash[RECORDED] = told


def _recorded(directory: Path, run: str) -> RecordedRun:
    """Return the record of a run that has not ended.

    Raises:
        pytest.UsageError: It is no run, or it has ended.
    """
    try:
        found = read_run(directory)
    except RunError as error:
        raise pytest.UsageError(
            f"--attach: {run} holds no {RUN_FILE} that can be read ({error}); expected the run "
            f"directory of a pytest that had submitted its workloads"
        ) from None
    if found.arguments is None:
        raise pytest.UsageError(
            f"--attach: {directory / RUN_FILE} is not of a run; give a run directory"
        )
    if found.ended is not None:
        raise pytest.UsageError(
            f"--attach: {run} ended at {found.ended} with exit code {found.exit_code}; "
            f"there is nothing to take over; start a new run"
        )
    return found


def _refuse_other_directory(early_config: pytest.Config, started: str, run: str) -> None:
    """Make sure that relative paths mean what they meant.

    Raises:
        pytest.UsageError: The user is elsewhere.
    """
    here, root = early_config.invocation_params.dir, early_config.rootpath
    then = Path(os.path.normpath(root / started))
    if then == here:
        return
    if "--attach" in map(str, early_config.invocation_params.args):
        # pytest takes the path for one of tests when it looks for the root, before any plugin.
        raise pytest.UsageError(
            f"--attach {run}: in two words, pytest takes the project's root from this path, and "
            f"found {root}; change to where the run was started ({started!r} from the project's "
            f"root) and write --attach={run}"
        )
    raise pytest.UsageError(
        f"--attach: {run} was started in {then}, if the project's root is {root}, and you are in "
        f"{here}; change to the directory where it was started"
    )

"""Rows whose script calls Megatron-LM's driver, as rows that name their program.

Such a row keeps what it was written as. One whose script does more than is known stays a script.

Source: Megatron-LM tests/functional_tests/shell_test_utils/run_ci_test.sh and _run_training.sh,
d98e8a64dd.
"""

from __future__ import annotations

import contextlib
import functools
import posixpath
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pytest_megatron.base.files import JsonValue
from pytest_megatron.base.text import one_of
from pytest_megatron.base.yaml import YamlDocument, YamlError, read_document
from pytest_megatron.errors import RecipeError
from pytest_megatron.workloads.recipe.case import CASES, case_path, golden_name
from pytest_megatron.workloads.recipe.driver_script import (
    CODE,
    OWN,
    DriverCall,
    OnlyBashError,
    ScriptError,
)
from pytest_megatron.workloads.recipe.model import OfDriver, Workload, fill_in

_DEMANDED = (
    *("TRAINING_SCRIPT_PATH", "TRAINING_PARAMS_PATH", "GOLDEN_VALUES_PATH", "OUTPUT_PATH"),
    *("TENSORBOARD_PATH", "CHECKPOINT_SAVE_PATH", "CHECKPOINT_LOAD_PATH", "DATA_PATH"),
    "DATA_CACHE_PATH",
)
_RANKS, _LIGHTWEIGHT, _RECORD = "GPUS_PER_NODE", "ENABLE_LIGHTWEIGHT_MODE", "RECORD_CHECKPOINTS"
_REPEATS = "N_REPEAT"
_KNOWN = (*_DEMANDED, "INFERENCE_OUTPUT_PATH", _REPEATS, _LIGHTWEIGHT, _RECORD, _RANKS)
_DEFAULT_RANKS = "8"
# What says where nodes meet; the plan does.
_OF_LAUNCHERS = re.compile(r"(?:MASTER|NODE|NUM_NODES|RUN_CI|SLURM|BASH_ENV|HOME$|PATH$)").match
# Placeholders, and what marks them while a script is read, which is read once for all of its rows.
_MARK = re.compile("\ue010(\\w+)\ue011")
_DIRECTORIES = ("artifacts_dir", "assets_dir")
_OURS = (*_DIRECTORIES, "n_repeat")
_CHECKOUT_WORDS = (
    *("cd", "cp", "echo", "export", "git", "ls", "mkdir", "printf", "rm", "set", "trap", "umask"),
    "unset",
)


class _PlaceholderMarks(dict[str, JsonValue]):
    """Values of placeholders: their marks."""

    def __missing__(self, key: str) -> str:
        return f"\ue010{key}\ue011"


def native_rows(
    rows: Sequence[Workload], env: Mapping[str, str], root: Path
) -> tuple[Workload, ...]:
    """Return rows, those whose script calls the driver as native ones.

    Args:
        rows: As the recipe has them.
        env: The environment of the session, which a script would run in.
        root: The checkout.

    Raises:
        RecipeError: A script is wrong; names its line.
    """
    calls: dict[str, DriverCall] = {}
    read = functools.cache(read_document)

    def native(row: Workload) -> Workload:
        """Return one row; as it is, with the reason, if only bash can run its script."""
        try:
            return _Native(row, env, root, calls, read).row()
        except ScriptError as error:
            text, line = _MARK.sub(r"{\1}", error.text), _file_line(row, error.line, read)
            if isinstance(error, OnlyBashError):
                return run_by_bash(row, env, f"line {line}: {text}")
            raise RecipeError(f"{row.file}:{line}", text) from None

    for file in {row.file: None for row in rows if row.calls_driver}:
        above, is_found, _ = file.read_bytes().partition(b"\r")
        if is_found:
            raise RecipeError(
                f"{file}:{len(above.splitlines())}",
                "the line ends as on Windows, expected a line feed alone, as bash does; convert "
                "the file with dos2unix",
            )
    return tuple(native(row) if row.calls_driver else row for row in rows)


def _file_line(row: Workload, line: int, read: Callable[[Path], YamlDocument]) -> int:
    """Return the line of the file that a line of the script, from 0, stands on."""
    document = read(row.file)
    spec = document.value.get("spec")
    is_shared = isinstance(spec, dict) and spec.get("script") == row.script
    begin = document.line_of(("spec", "script")) if is_shared else row.line
    return begin + (line + 1 if "\n" in str(row.script).strip() else 0)


def require_yq(where: str) -> None:
    """Refuse to have bash run Megatron-LM's driver without yq 4.

    Raises:
        RecipeError: There is no yq 4.
    """
    if not is_yq(shutil.which("yq")):
        raise RecipeError(
            where,
            "Megatron-LM's driver needs yq 4 (https://github.com/mikefarah/yq) on the PATH, and "
            "there is none, nothing was run; install it",
        )


@functools.cache
def is_yq(program: str | None) -> bool:
    """Return whether a program is the yq of the driver; another one of that name differs."""
    if program is None:
        return False
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    except OSError:
        return False
    return "mikefarah" in done.stdout


def run_by_bash(row: Workload, env: Mapping[str, str], why: str) -> Workload:
    """Return a row whose script bash runs, with the ranks that the driver starts."""
    is_said = _RANKS in str(row.script)
    text = env.get(_RANKS, "") or _DEFAULT_RANKS
    return replace(
        row, by_bash=why, gpus=int(text) if text.isdecimal() and not is_said else row.gpus
    )


def setup_lines(script: str) -> Iterator[str]:
    """Yield the lines of a `script_setup` that do more than get the code, which is there."""
    for line in script.splitlines():
        words = line.split()
        if words and not words[0].startswith("#") and words[0] not in _CHECKOUT_WORDS:
            yield line.strip()


class _Native:
    """Makes a native row of one whose script calls the driver."""

    def __init__(
        self,
        row: Workload,
        env: Mapping[str, str],
        root: Path,
        calls: dict[str, DriverCall],
        read: Callable[[Path], YamlDocument],
    ) -> None:
        self._row = row
        self._env = env
        self._case = case_path(root, row)
        self._read = read
        assert row.script is not None
        row.render(row.script, **dict.fromkeys(_OURS, ""), name=row.name)  # a placeholder may lack
        if row.script not in calls:
            # Where a script names the checkout itself, that is the one it expects.
            text = with_paths(
                fill_in(row.script, _PlaceholderMarks()), {str(root.absolute()): CODE}
            )
            calls[row.script] = DriverCall(text, env)
        self._call = calls[row.script]

    def row(self) -> Workload:
        """Return the row.

        Raises:
            OnlyBashError: A plan cannot do what the driver would.
            ScriptError: The script is wrong.
        """
        arguments = {k: (line, self._filled(v)) for k, (line, v) in self._call.arguments.items()}
        exported = {k: (line, self._filled(v)) for k, (line, v) in self._call.env.items()}
        known = {name: value for name, value in exported.items() if name in _KNOWN} | arguments
        # What only the case reads.
        others = {n: v for n, v in {**exported, **arguments}.items() if n not in _KNOWN}
        self._refuse_unread(arguments)
        for key in _DEMANDED:
            if not known.get(key, (0, ""))[1]:
                line = max((line for line, _ in arguments.values()), default=0)
                raise OnlyBashError(line, f"no {key} is given to the driver, which demands it")
        self._refuse_other(known, others)
        values = {key: value for key, (_, value) in known.items()}
        row = replace(
            self._row,
            script=None,
            training_script_path=self._program(*known["TRAINING_SCRIPT_PATH"]),
            data_path=self._here(values["DATA_PATH"]),
            data_cache_path=self._cache(values["DATA_CACHE_PATH"]),
            checkpoint_load_path=self._here(values["CHECKPOINT_LOAD_PATH"])
            .replace("{", "{{")
            .replace("}", "}}"),
            gpus=self._ranks(known),
            n_repeat=self._repeats(known),
        )
        return replace(
            row,
            of_driver=OfDriver(
                written=self._row,
                env={name: self._here(value) for name, (_, value) in others.items()},
                unset=tuple(sorted(self._call.unset)),
                directory=f"{self._call.directory}/".removeprefix(f"{CODE}/").rstrip("/"),
                is_lightweight=values.get(_LIGHTWEIGHT) == "true",
            ),
        )

    def _refuse_unread(self, arguments: Mapping[str, tuple[int, str]]) -> None:
        """Refuse an argument that neither the driver nor the case reads."""
        text = self._case.read_text(errors="replace") if self._case.is_file() else ""
        for key, (line, _) in arguments.items():
            if key not in _KNOWN and not re.search(rf"\$\{{?{key}\b", text):
                expected = (
                    f"expected {one_of(key, _KNOWN)}, or one that {self._case.name} refers to"
                )
                raise ScriptError(line, f"unknown key {key!r}, {expected}")

    def _refuse_other(
        self, known: Mapping[str, tuple[int, str]], others: Mapping[str, tuple[int, str]]
    ) -> None:
        """Refuse what the driver would do and a plan does not."""
        row = self._row
        case = CASES / row.model / row.test_case
        places = {
            "TRAINING_PARAMS_PATH": case_path(Path(), row),
            "GOLDEN_VALUES_PATH": case / golden_name(row.environment, row.platform),
        }
        for key, expected in places.items():
            line, value = known[key]
            if self._inside(key, line, value) != expected.as_posix():
                raise OnlyBashError(line, f"{key} is {value}, expected {expected}")
        for key in (_RECORD, "CHECKPOINT_LOAD_PATH", "DATA_PATH"):
            line, value = known.get(key, (0, ""))
            if value == "true" if key == _RECORD else self._is_own(value):
                raise OnlyBashError(line, f"{key} is {value}")
        for name, (line, value) in others.items():
            if _OF_LAUNCHERS(name) or self._is_own(value):
                raise OnlyBashError(line, f"{name} is {value}")

    def _program(self, line: int, value: str) -> str:
        """Return the program, which counts from the directory of the call."""
        file, blank, rest = value.partition(" ")
        if not file.endswith(".py") and "/" not in file:
            return value  # a command
        inside = self._inside("TRAINING_SCRIPT_PATH", line, file)
        if file.startswith("/"):
            file = posixpath.relpath(f"{CODE}/{inside}", self._call.directory)
        return f"{file}{blank}{rest}"

    def _inside(self, key: str, line: int, value: str) -> str:
        """Return a path relative to the checkout."""
        path = posixpath.normpath(posixpath.join(self._call.directory, value))
        if not path.startswith(f"{CODE}/"):
            problem = f"{key} is {value!r}, expected a path in the checkout; change it"
            raise ScriptError(line, problem)
        return path.removeprefix(f"{CODE}/")

    def _ranks(self, known: Mapping[str, tuple[int, str]]) -> int:
        """Return the ranks of a node: as many as the driver would start."""
        line, text = known.get(_RANKS, (0, self._env.get(_RANKS, "") or _DEFAULT_RANKS))
        return _number(_RANKS, line, text)

    def _repeats(self, known: Mapping[str, tuple[int, str]]) -> int | None:
        """Return how often it trains: as the case says, else the script, else the row."""
        line, text = known.get(_REPEATS, (0, ""))
        if self._case.is_file() and _REPEATS in self._case.read_text(errors="replace"):
            with contextlib.suppress(YamlError):  # the plan says why it cannot be read
                case = self._read(self._case)
                env = case.value.get("ENV_VARS")
                if isinstance(env, dict) and env.get(_REPEATS) not in (None, False):
                    text = case.text_of(("ENV_VARS", _REPEATS)) or "a container"
        if text in ("", "{n_repeat}"):
            return self._row.n_repeat
        return _number(_REPEATS, line, text)

    def _cache(self, path: str) -> str | None:
        """Return the cache of data; None for one that each attempt has of its own."""
        is_removed = any(f"{path}/".startswith(f"{one}/") for one in self._call.removed)
        top = Path(*Path(path).parts[:2])
        is_there = not path.startswith("/") or top.exists()
        return None if is_removed or self._is_own(path) or not is_there else path

    def _is_own(self, value: str) -> bool:
        """Return whether a value names a directory that each run has of its own."""
        return OWN in value or any(f"{{{name}}}" in value for name in _DIRECTORIES)

    def _here(self, value: str) -> str:
        """Return a value with the container's data replaced by the user's, where it has none."""
        return with_paths(value, container_paths(self._env))

    def _filled(self, text: str) -> str:
        """Return a text with the row's values in place of marks; those of ours stay open."""
        values = {**self._row.spec, "name": self._row.name}
        values |= {name: f"{{{name}}}" for name in _OURS}
        return _MARK.sub(lambda mark: str(values[mark[1]]), text)


def _number(key: str, line: int, text: str) -> int:
    """Return a number from 1 on."""
    if not text.isdecimal() or not int(text):
        raise OnlyBashError(line, f"{key} is {text!r}, expected a number from 1 on")
    return int(text)


def container_paths(env: Mapping[str, str]) -> dict[str, str]:
    """Return directories of Megatron-LM's container to those that stand in for them here."""
    paths = {} if Path("/opt/venv").exists() else {"/opt/venv": sys.prefix}
    if "DATA_PATH" in env and not Path("/mnt/artifacts").exists():
        paths["/mnt/artifacts"] = env["DATA_PATH"]
    return paths


def with_paths(text: str, paths: Mapping[str, str]) -> str:
    """Return a text with directories replaced."""
    for there, here in paths.items():
        text = re.sub(rf"{re.escape(there)}(?![\w-])", here.replace("\\", r"\\"), text)
    return text

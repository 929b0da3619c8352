"""Recognise logs, ranks and directories by names of files. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePath

from pytest_megatron.triage.launch import Stream
from pytest_megatron.triage.logs.flight_recorder import is_flight_name, rank_of

ERROR_FILE = "error.json"
RECORDS = ("plan.json", "run.json", "triage.json", "health.json", "comparison.json")
SKIPPED_DIRECTORIES = frozenset(
    {".git", "__pycache__", "checkpoints", "data_cache", "tensorboard", "site-packages", "wandb"}
    | {"node_modules", ".venv"}
)
_LOG_SUFFIXES = (".log", ".out", ".err", ".txt", ".stdout", ".stderr", ".output")
_LOG_NAMES = ("stdout", "stderr", "nohup.out", "output", "log")
_NOT_LOGS = ("requirements.txt", "latest_checkpointed_iteration.txt", "stacks.txt", "script.sh")
_RANK_DIRECTORY = re.compile(r"^(?:rank|local_rank|worker|task|proc)?[-_.]?(\d{1,5})$")
_NODE_DIRECTORY = re.compile(r"^(?:node|host)[-_.]?(\d{1,4})$")
_SAID = re.compile(r"(?:^|[._-])(?:rank|task|proc|worker|r|t)[._-]?(\d{1,5})(?=[._-]|$)")
_LAST = re.compile(r"[._-](\d{1,5})$")
_ENDS = re.compile(r"(?:\.(?:log|out|err|txt|stdout|stderr|output))+$|[._-](?:out|err)$")


def is_log(path: PurePath) -> bool:
    """Return true if a file in a directory is taken for a log."""
    name = path.name.lower()
    if name in _NOT_LOGS or name.startswith("."):
        return False
    return name.endswith(_LOG_SUFFIXES) or name in _LOG_NAMES


def is_worth_reading(path: PurePath) -> bool:
    """Return true if a member of an archive is worth unpacking."""
    if SKIPPED_DIRECTORIES & set(path.parts[:-1]):
        return False
    named = path.name == ERROR_FILE or path.name in RECORDS
    return named or is_log(path) or flight_rank(path) is not None


def flight_rank(path: PurePath) -> int | None:
    """Return the rank of a flight recorder's dump by its name or directory, None if it is none."""
    return rank_of(Path(path)) if is_flight_name(path.name) else None


def directory_rank(path: PurePath) -> int | None:
    """Return the rank that a directory is named after, as torch does, None if it is not."""
    found = _RANK_DIRECTORY.match(path.name)
    return None if found is None else int(found[1])


def node_of(path: PurePath) -> int | None:
    """Return the number of the node that a directory in a path is named after."""
    found = [m for part in path.parts if (m := _NODE_DIRECTORY.match(part)) is not None]
    return int(found[-1][1]) if found else None


def stream_of(path: PurePath) -> Stream:
    """Return which of a rank's logs a file is, by its name."""
    name = path.name.lower()
    if "stderr" in name or name.endswith(".err"):
        return Stream.STDERR
    if "stdout" in name:
        return Stream.STDOUT
    return Stream.BOTH


def ranks_by_name(paths: Iterable[PurePath]) -> Mapping[PurePath, int]:
    """Return whose each of the logs of one directory is, of those that are named after ranks.

    `job_3.out` is rank 3's if there is a `job_0.out` and every number between; `job-rank3.log` and
    Slurm's `%t` always are. Numbers of jobs and of attempts are not taken for ranks.
    """
    said: dict[PurePath, int] = {}
    series: dict[str, dict[int, list[PurePath]]] = {}
    for path in paths:
        stem = _ENDS.sub("", path.name)
        explicit, last = _SAID.search(stem), _LAST.search(f".{stem}")
        if explicit is not None:
            said[path] = int(explicit[1])
        elif last is not None and not re.search(r"(?:attempt|run|try|phase|step|iter)", stem):
            prefix = f".{stem}"[: last.start()]
            series.setdefault(prefix, {}).setdefault(int(last[1]), []).append(path)
    for numbers in series.values():
        if len(numbers) > 1 and sorted(numbers) == list(range(len(numbers))):
            for number, found in numbers.items():
                said.update(dict.fromkeys(found, number))
    return said

"""Launchers in a command: torchrun, mpirun and the like around pytest or around a test. Pure."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from pytest_megatron.adopt.shell import Command, ShellText, Word, nested

_LAUNCHERS = {
    "torchrun": "torchrun",
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "nvidia_resiliency_ext.fault_tolerance.launcher": "torchrun",
    "ft_launcher": "torchrun",
    "accelerate": "accelerate",
    "accelerate-launch": "accelerate",
    "accelerate.commands.launch": "accelerate",
    "composer": "composer",
    "composer.cli.launcher": "composer",
    "deepspeed": "deepspeed",
    "horovodrun": "horovodrun",
    "mpirun": "mpi",
    "mpiexec": "mpi",
    "mpiexec.hydra": "mpi",
    "orterun": "mpi",
    "srun": "srun",
}
_MODULES = frozenset(name for name in _LAUNCHERS if "." in name and not name.startswith("mpi"))
_VARIABLE = re.compile(r"\$.*?(mpirun|mpiexec|torchrun|accelerate)", re.IGNORECASE)
_COUNTS = {  # options that hold the number of processes
    "torchrun": ("--nproc-per-node", "--nproc_per_node"),
    "accelerate": ("--num-processes", "--num_processes"),
    "composer": ("-n", "--nproc"),
    "deepspeed": ("--num-gpus", "--num_gpus"),
    "horovodrun": ("-np", "--num-proc"),
    "mpi": ("-n", "-np", "--np", "--n"),
    "srun": ("-n", "--ntasks"),
}
_NODES = ("--nnodes", "--num-machines", "--num_machines", "--num-nodes", "--num_nodes")
_PYTEST = ("pytest", "py.test")
_WRITERS = frozenset(
    {"echo", "printf", "pip", "pip3", "which", "type", "apt-get", "conda", "alias"}
)
_WRAPPERS = frozenset({"time", "then", "do", "if", "else", "!", "sudo", "env", "exec", "{"})
_TEST_PART = re.compile(r"(?:^|[_-])(?:tests?|testing)(?:$|[_-])")
_ECHOED = re.compile(r"\"?\$\(\s*echo\s+(.*)\)\"?", re.DOTALL)
_WORKERS = re.compile(r"(\S+?)\*popen")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedTests:
    """Pytest, or a Python file, that a launcher starts on several ranks.

    Attributes:
        line: Of the launcher's word, an index into the text.
        launcher: A value of the launchers' table, or `xdist`.
        num_ranks: As it is written: a number, a variable, `gpu`; "" is not given.
        num_nodes: The same of nodes, "" for one.
        script: The Python file, which may be no test; "" is pytest.
        arguments: Those of pytest, or of the script, as they are written.
        variables: Assignments in front of the launcher, as they are written.
        coverage: Arguments of `coverage run` between launcher and pytest, as they are written.
    """

    line: int
    launcher: str
    num_ranks: str
    num_nodes: str = ""
    script: str = ""
    arguments: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    coverage: tuple[str, ...] | None = None


def is_test_path(path: str) -> bool:
    """Return whether a file is part of tests: by its name, or by a folder above it."""
    pure = PurePosixPath(path)
    parts = (*pure.parts[:-1], pure.stem)
    return pure.name == "conftest.py" or any(_TEST_PART.search(part) for part in parts)


def launched_in(text: ShellText, outer: Command = ()) -> list[LaunchedTests]:
    """Return what commands launch, those in a word such as after `bash -c` included.

    Args:
        text: Commands with their variables.
        outer: Words in front of the word that holds them, where they are nested.
    """
    found: list[LaunchedTests] = []
    assigned: set[LaunchedTests] = set()  # `CMD="torchrun ..."`, which `$CMD` only repeats
    for command in text.commands:
        name = _program(command)
        if name in _WRITERS or any(word.raw == "install" for word in command[:5]):
            continue
        one = _launched(command) or _launched((*outer, *command))
        if one is not None:
            found += [one] if replace(one, line=0) not in assigned else []
            continue
        for index, word in enumerate(command):
            script = _script_of(word)
            if script is None or not (_may_launch(script.value) or _PYTEST[0] in script.value):
                continue
            is_assigned = script.raw != word.raw
            before = () if is_assigned else (*outer, *command[:index])
            inner = launched_in(nested(script, text.variables), before)
            found += inner
            assigned |= {replace(one, line=0) for one in inner if is_assigned}
    return found


def _script_of(word: Word) -> Word | None:
    """Return the word that is a script: quoted, assigned, or built by `$(echo ...)`."""
    name, equals, value = word.raw.partition("=")
    script = Word(value, word.line) if equals and name.isidentifier() else word
    echoed = _ECHOED.fullmatch(script.raw)
    if echoed is not None:
        return Word(shlex.quote(echoed[1]), word.line)
    return script if script.raw != script.value and " " in script.value else None


def _may_launch(text: str) -> bool:
    return any(name in text for name in _LAUNCHERS) or "popen" in text


def _program(command: Command) -> str:
    """Return the first word that is no assignment, wrapper or keyword."""
    for word in command:
        if "=" not in word.raw and word.raw not in _WRAPPERS:
            return PurePosixPath(word.value).name
    return ""


def _launched(command: Command) -> LaunchedTests | None:
    target = _find_target(command)
    if target is None:
        return None
    launchers = [
        (index, name)
        for index in range(target)
        if (name := _launcher_at(command, index)) is not None
    ]
    is_pytest = PurePosixPath(command[target].value).name in _PYTEST
    if not launchers:
        return _distributed_by_xdist(command, target) if is_pytest else None
    index, launcher = launchers[-1]
    between = command[index + 1 : target]
    script = "" if is_pytest else command[target].value
    return LaunchedTests(
        line=command[index].line,
        launcher=launcher,
        num_ranks=_option(between, _COUNTS[launcher]),
        num_nodes=_nodes(between),
        script=script,
        arguments=tuple(word.raw for word in command[target + 1 :]),
        variables=_assignments(command[:index]),
        coverage=_coverage(between),
    )


def _find_target(command: Command) -> int | None:
    """Return the index of pytest, or of the first Python file, whichever comes first."""
    for index, word in enumerate(command):
        value = word.value
        name = PurePosixPath(value).name
        if name in _PYTEST or re.search(r"\$\(which pytest\)", value):
            return index
        if name.endswith(".py") and "=" not in value and index:
            return index
    return None


def _launcher_at(command: Command, index: int) -> str | None:
    """Return the kind of launcher that a word is, None for any other word."""
    word = command[index]
    value = PurePosixPath(word.value).name
    if value in _MODULES:
        is_module = index > 0 and command[index - 1].value.endswith("m")  # -m, -um
        return _LAUNCHERS[value] if is_module else None
    if value == "accelerate":
        following = command[index + 1].value if index + 1 < len(command) else ""
        return "accelerate" if following == "launch" else None
    if value in _LAUNCHERS:
        return _LAUNCHERS[value]
    match = _VARIABLE.match(word.raw.strip('"'))
    if match is None or word.raw.startswith("$("):
        return None
    return _LAUNCHERS[match[1].lower()]


def _option(words: Sequence[Word], names: Sequence[str]) -> str:
    """Return the value of the last option with one of these names, as it is written."""
    found = ""
    for index, word in enumerate(words):
        name, equals, value = word.raw.partition("=")
        if name in names:
            found = value if equals else words[index + 1].raw if index + 1 < len(words) else ""
    return found.strip("\"'")


def _nodes(words: Sequence[Word]) -> str:
    nodes = _option(words, _NODES)
    return "" if nodes in ("1", "1:1") else nodes


def _assignments(words: Sequence[Word]) -> tuple[str, ...]:
    """Return the assignments in front of a program."""
    plain = (word.raw for word in words if word.raw not in _WRAPPERS)
    return tuple(itertools.takewhile(re.compile(r"[A-Za-z_]\w*=").match, plain))


def _coverage(words: Sequence[Word]) -> tuple[str, ...] | None:
    """Return the arguments of `coverage run` in front of `-m pytest`, None without it."""
    values = [word.value for word in words]
    if "coverage" not in values:
        return None
    start = values.index("coverage") + 1
    inside = [word.raw for word in words[start:] if word.value != "run"]
    return tuple(inside[:-1] if inside and inside[-1] == "-m" else inside)


def _distributed_by_xdist(command: Command, target: int) -> LaunchedTests | None:
    """Return the tests that every worker of pytest-xdist runs, by `--dist=each`."""
    words = command[target + 1 :]
    if _option(words, ("--dist",)) != "each":
        return None
    workers = _WORKERS.search(_option(words, ("--tx",)))
    options = ("--dist", "--tx")
    kept = [
        word.raw
        for before, word in itertools.pairwise((command[target], *words))
        if before.value not in options and word.value.partition("=")[0] not in options
    ]
    return LaunchedTests(
        line=command[target].line,
        launcher="xdist",
        num_ranks="" if workers is None else workers[1],
        arguments=tuple(kept),
        variables=_assignments(command[:target]),
    )

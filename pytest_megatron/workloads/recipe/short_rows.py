"""Rows in the short form: a name and a command line, without a case beside them. Pure.

Each becomes the same workload and case as a row of `products` with its `model_config.yaml`, so that
nothing but this module knows of the form.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Annotated, Literal, NotRequired, TypeAlias, cast

from annotated_types import MinLen
from typing_extensions import TypedDict

from pytest_megatron.base.files import JsonValue
from pytest_megatron.base.findings import Finding, finding_at
from pytest_megatron.base.schema import (
    About,
    Count,
    FormatVersion,
    Positive,
    Text,
    Texts,
    closed,
    matches,
)
from pytest_megatron.base.yaml import YamlDocument, YamlPath
from pytest_megatron.workloads.recipe.case import ExitPolicy, Line, Resume, Stop
from pytest_megatron.workloads.recipe.expand import (
    Product,
    unknown_words,
)
from pytest_megatron.workloads.recipe.metrics import MetricsFrom
from pytest_megatron.workloads.recipe.model import ANY_SCOPE, Row, RowError, Vocabulary

_KEY = "rows"
_NONE, _COMPARE = "none", "compare"
_DEFAULTS: Mapping[str, str] = {"environment": "dev", "scope": ANY_SCOPE, "platforms": "cpu"}
_Words: TypeAlias = Text | Texts
_Name: TypeAlias = Annotated[
    str, matches(r"[A-Za-z0-9][\w.+-]*", "letters, digits and any of . _ + -")
]


@closed
class QuarantineKeys(TypedDict):
    """The reason that a failure does not count, and the last day of that."""

    reason: Text
    until: Annotated[Text, About("The last day that it holds, such as 2026-12-31.")]


@closed
class MetricsKeys(MetricsFrom):
    """Metrics that are compared, and where the program writes them."""

    names: Texts


class RowSettings(TypedDict):
    """Keys that a row in the short form has as the spec of a recipe has them."""

    time_limit: NotRequired[Annotated[Positive | None, About("Seconds.")]]
    n_repeat: NotRequired[Positive | None]
    max_attempts: NotRequired[Positive | None]
    transient: NotRequired[Annotated[Texts | None, About("Ids of signatures.")]]
    never_transient: NotRequired[Annotated[Texts | None, About("Ids of signatures.")]]
    quarantine: NotRequired[QuarantineKeys | None]


@closed
class ShortRow(RowSettings):
    """One program that trains, as it is started by hand."""

    name: Annotated[_Name, About("Name of the item and of its golden.")]
    command: Annotated[
        Line | Annotated[tuple[str | int | float, ...], MinLen(1)],
        About("Line or list of words; no shell runs it. ${NAME} is a variable."),
    ]
    ranks: NotRequired[
        Annotated[
            Positive | Literal["none"], About("Ranks per node; none starts the program alone.")
        ]
    ]
    nodes: NotRequired[Positive]
    gpus: NotRequired[Annotated[Positive, About("GPUs of a program that is started alone.")]]
    env: NotRequired[dict[str, str | int | float | bool | None]]
    last_step: NotRequired[Annotated[Count, About("The last step of the metrics.")]]
    stop: NotRequired[Stop]
    metrics: NotRequired[Annotated[Texts | MetricsKeys, About("Names, or names and source.")]]
    resume: NotRequired[Resume]
    compare: NotRequired[
        Annotated[
            Literal["none"] | dict[str, dict[str, object]],
            About("Metric to limits, as in a policy file; none compares with no golden."),
        ]
    ]
    deterministic: NotRequired[Annotated[bool, About("Whether two runs are equal; true.")]]
    exit_policy: NotRequired[ExitPolicy]
    platforms: NotRequired[Annotated[_Words, About("Such as cpu, which it is by default.")]]
    environment: NotRequired[Annotated[_Words, About("dev by default.")]]
    scope: NotRequired[Annotated[_Words, About("Every one by default.")]]
    cadence: NotRequired[Texts]
    tag: NotRequired[Text]


@closed
class ShortRecipe(TypedDict):
    """A recipe of programs, each as it is started by hand."""

    rows: Annotated[tuple[ShortRow, ...], MinLen(1)]
    model: NotRequired[
        Annotated[_Name, About("Folder of their goldens; the file's name without .yaml.")]
    ]
    format_version: NotRequired[FormatVersion]
    maintainers: NotRequired[tuple[str, ...]]


# Keys of a row -> the key of a case.
_OF_CASE = {
    "last_step": "LAST_STEP",
    "stop": "STOP",
    "resume": "RESUME",
    "exit_policy": "EXIT_POLICY",
}


def is_short(value: Mapping[str, JsonValue]) -> bool:
    """Return whether the content of a recipe file is in the short form."""
    return _KEY in value


def expand_rows(
    document: YamlDocument,
    vocabulary: Vocabulary,
    forbidden: Sequence[YamlPath],
    findings: list[Finding],
) -> Iterator[Row]:
    """Yield the rows of a file in the short form, one for each platform, environment and scope.

    Args:
        document: The recipe.
        vocabulary: The words that it may use.
        forbidden: Places where the file departs from the schema; a row with one is left out, and
            outside of `rows` it leaves the file without any.
        findings: Gets further errors.
    """
    rows = document.value[_KEY]
    if not isinstance(rows, list) or any(
        path[:1] != (_KEY,) or path[1:] == () for path in forbidden
    ):
        return
    lines: dict[JsonValue, int] = {}
    for index, row in enumerate(rows):
        path: YamlPath = (_KEY, index)
        if any(place[:2] == path for place in forbidden) or not isinstance(row, dict):
            continue
        line = document.line_of(path)
        findings += unknown_words(document, vocabulary, row, path)
        if lines.setdefault(row["name"], line) != line:
            message = f"name: {row['name']!r} is also the row of line {lines[row['name']]}; "
            message += "expected one row of a name; change one"
            findings.append(finding_at(document, (*path, "name"), "row", message))
            continue
        try:
            yield from _ShortReader(document, path, row).rows(line)
        except RowError as problem:
            place = (*path, problem.key) if isinstance(problem, _KeyMisfitError) else path
            findings.append(finding_at(document, place, "row", str(problem)))


class _KeyMisfitError(RowError):
    """A key of a row has no meaning beside the others; its text becomes a finding."""

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(f"{key}: {problem}")
        self.key, self.problem = key, problem


@dataclass(frozen=True, slots=True)
class _Command:
    """What a command line starts.

    Attributes:
        words: The program and its arguments, without the launcher that ours replaces.
        ranks: Processes on a node that a launcher starts; 1 of a program without one.
        nodes: Launchers that meet.
        is_alone: Whether it is started as it is, without RANK.
        env: Variables that stand before it.
    """

    words: tuple[str, ...]
    ranks: int
    nodes: int
    is_alone: bool
    env: Mapping[str, str]


class _ShortReader:
    """Turns one row that fits the schema into the keys of a spec and of a case."""

    def __init__(self, document: YamlDocument, path: YamlPath, row: dict[str, JsonValue]) -> None:
        self.row = row
        self._document = document
        self._path = path
        self._command = read_command(self._words(), row.get("ranks"))

    def rows(self, line: int) -> list[Row]:
        """Return the rows, one for each combination of its lists."""
        row, case = self.row, self.case()
        axes: dict[str, JsonValue] = {}
        for key, default in _DEFAULTS.items():
            value = row.get(key, default)
            axes[key] = value if isinstance(value, list) else [value]
        product = Product(self.spec(), row["name"], axes, row.get("cadence"), line)
        return [replace(one, case=case) for one in product.rows()]

    def spec(self) -> dict[str, JsonValue]:
        """Return the keys that the row would have in a recipe."""
        command, row = self._command, self.row
        if "gpus" in row and not command.is_alone:
            raise _KeyMisfitError("gpus", "each rank has one of its own; remove it")
        nodes = row.get("nodes", command.nodes)
        if command.is_alone and nodes != 1:
            raise _KeyMisfitError("nodes", "a program without ranks has one; give ranks a number")
        return {
            "model": self._document.value.get("model") or self._document.file.stem,
            "gpus": row.get("gpus", command.ranks),
            "nodes": nodes,
            "training_script_path": shlex.join(command.words),
            **{key: row[key] for key in ("tag", *RowSettings.__annotations__) if key in row},
            **({} if row.get("compare") in (None, _NONE) else {_COMPARE: row["compare"]}),
        }

    def case(self) -> YamlDocument:
        """Return the keys that the row would have in a case, with their lines."""
        row = self.row
        env = dict(self._command.env)
        lines = dict.fromkeys(env, self._line("command"))
        for name in cast("dict[str, JsonValue]", row.get("env", {})):
            env[name] = self._document.text_of((*self._path, "env", name)) or ""
            lines[name] = self._line("env", name)
        metrics = row.get("metrics")
        if row.get("compare") == _NONE:
            env["SKIP_PYTEST"], lines["SKIP_PYTEST"] = "1", self._line(_COMPARE)
        if row.get("deterministic") is False:
            varies = "NON_DETERMINSTIC_RESULTS"
            env[varies], lines[varies] = "1", self._line("deterministic")
        keys: list[tuple[str, str, JsonValue]] = [  # of the case, of the row, the value
            ("TEST_TYPE", "resume", "ckpt-resume" if "resume" in row else "regular"),
            ("ENV_VARS", "env", cast("JsonValue", env)),
            *((key, name, row[name]) for name, key in _OF_CASE.items() if name in row),
        ]
        if self._command.is_alone:
            keys.append(("LAUNCHER", "ranks", _NONE))
        if isinstance(metrics, dict):
            source = {key: one for key, one in metrics.items() if key != "names"}
            keys += [("METRICS_FROM", "metrics", source)] if source else []
            metrics = metrics["names"]
        keys += [] if metrics is None else [("METRICS", "metrics", metrics)]
        places = {key: self._line(name) for key, name, _ in keys}
        value = {key: one for key, _, one in keys}
        return self._document.rearranged(value, {"": places, "ENV_VARS": lines})

    def _words(self) -> tuple[str, ...]:
        """Return the words of the command."""
        value = self.row["command"]
        if isinstance(value, list):
            places = ((*self._path, "command", number) for number in range(len(value)))
            return tuple(self._document.text_of(place) or "" for place in places)
        words = shlex.split(str(value))
        if shell := next((word for word in words if _OF_SHELL(word)), None):
            raise _KeyMisfitError(
                "command",
                f"has {shell!r}, and no shell runs it, expected one command; write a script and "
                f"name that, or a list of words if the program takes it",
            )
        return tuple(words)

    def _line(self, *keys: str) -> int:
        return self._document.line_of((*self._path, *keys))


_OF_SHELL = re.compile(r"&&?|\|\|?|;|\d?>{1,2}|<|\d?>&\d|[^$]*;|`.*").fullmatch
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL).fullmatch
is_python = re.compile(r"python(3(\.\d+)?)?").fullmatch
_TORCHRUN = ("torch.distributed.run",)
# Options of torchrun without a value; all others have one.
# Source: torch/distributed/run.py, get_args_parser(), v2.11.
_LOGS = re.compile(r"-[rt]|--(log[-_]dir|redirects|tee)(=.*)?").fullmatch
_BARE = ("standalone", "no-python", "run-path", "m", "module", "virtual-local-rank")
# Launchers that start ranks themselves -> their options for the number of processes here.
_OWN_LAUNCHERS: Mapping[str, tuple[str, ...]] = {
    "accelerate": ("--num_processes", "--num-processes"),
    "deepspeed": ("--num_gpus", "--num_accelerators"),
}


def read_command(words: Sequence[str], asked: JsonValue = None) -> _Command:
    """Return what a command line starts.

    torchrun is left out, as our launcher does the same and has logs of each rank. Any other
    launcher is a part of the program.

    Args:
        words: The line's.
        asked: `ranks` of the row.
    """
    env: dict[str, str] = {}
    rest = list(words)
    while rest and (assigned := _ASSIGNMENT(rest[0])):
        env[assigned[1]] = assigned[2]
        del rest[0]
    if not rest:
        raise _KeyMisfitError("command", "is empty, expected a program and its arguments")
    ranks = asked if isinstance(asked, int) else None
    if asked == _NONE:
        return _Command(_without_python(rest), 1, 1, is_alone=True, env=env)
    if (launched := after_torchrun(rest)) is not None:
        program, options = _split_torchrun(launched)
        found = _number(options, "nproc-per-node", "ranks") or ranks or 1
        if ranks not in (None, found):
            raise _KeyMisfitError(
                "ranks", f"is {ranks}, and the command starts {found} on a node; change one"
            )
        nodes = _number(options, "nnodes", "nodes") or 1
        return _Command(program, found, nodes, is_alone=False, env=env)
    if options_of := _OWN_LAUNCHERS.get(PurePath(rest[0]).name):
        parts = list(itertools.chain.from_iterable(word.split("=", 1) for word in rest))
        pairs = itertools.pairwise(parts)
        found = next((int(b) for a, b in pairs if a in options_of and b.isdecimal()), 1)
        return _Command(tuple(rest), ranks or found, 1, is_alone=True, env=env)
    return _Command(_without_python(rest), ranks or 1, 1, is_alone=ranks is None, env=env)


def after_torchrun(words: Sequence[str]) -> list[str] | None:
    """Return the words behind torchrun, None of another command."""
    if PurePath(words[0]).name == "torchrun":
        return list(words[1:])
    is_module = is_python(words[0]) and tuple(words[1:2]) == ("-m",)
    return list(words[3:]) if is_module and tuple(words[2:3]) == _TORCHRUN else None


def with_logs_of_ranks(words: Sequence[str], logs: PurePath) -> tuple[str, ...]:
    """Return a command whose ranks leave a log each, where torchrun starts it and keeps none."""
    launched = after_torchrun(words)
    if launched is None or any(_LOGS(word) for word in launched):
        return tuple(words)
    own = words[: len(words) - len(launched)]
    return (*own, "--log_dir", str(logs), "--tee", "3", *launched)


def _split_torchrun(words: list[str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the program with its arguments, and torchrun's own options."""
    options: dict[str, str] = {}
    while words and words[0].startswith("-"):
        name, has_value, value = words.pop(0).lstrip("-").partition("=")
        name = name.replace("_", "-")
        if name not in _BARE and not has_value and words:
            value = words.pop(0)
        options[name] = value
    if not words:
        raise _KeyMisfitError("command", "torchrun is given no program, expected one behind it")
    if options.keys() & {"m", "module"}:
        return ("-m", *words), options
    return tuple(words), options


def _number(options: Mapping[str, str], name: str, key: str) -> int | None:
    """Return the number of an option of torchrun, None without it."""
    text = options.get(name)
    if text is not None and not (text.isdecimal() and int(text)):
        raise _KeyMisfitError(
            "command", f"--{name} is {text!r}, expected a number; leave it out and write {key}"
        )
    return None if text is None else int(text)


def _without_python(words: Sequence[str]) -> tuple[str, ...]:
    """Return a command without the interpreter that is ours anyway."""
    if not is_python(words[0]):
        return tuple(words)
    rest = [word for word in words[1:2] if word != "-u"] + list(words[2:])
    is_ours = bool(rest) and (rest[0].endswith(".py") or (rest[0] == "-m" and len(rest) > 1))
    return tuple(rest) if is_ours else tuple(words)

"""Kinds of options and of their values; a wrong value is a usage error.

Runs at every pytest start, so it imports nothing heavy.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

import pytest

from pytest_megatron.errors import MegatronError

T_co = TypeVar("T_co", covariant=True)
D = TypeVar("D")
ChoiceT = TypeVar("ChoiceT", bound=str)


@dataclass(frozen=True, slots=True)
class ValueKind(Generic[T_co]):
    """A kind of value; called, it declares a field that is an option of this kind.

    Attributes:
        parse: Return the value for an option's name and the user's input.
        metavar: Its placeholder in the help; "" for a flag, which takes no value.
        is_repeatable: Whether the command line may hold the option several times.
    """

    parse: Callable[[str, object], T_co]
    metavar: str = ""
    is_repeatable: bool = False

    def __call__(
        self, name: str, text: str, default: D, shown: str = "", metavar: str = ""
    ) -> T_co | D:
        """Return the field; for the arguments see `OptionRow`."""
        row = OptionRow(name, text, self, default, shown, metavar or self.metavar)
        declared: D = field(metadata={"row": row})
        return declared


@dataclass(frozen=True, slots=True)
class OptionRow:
    """One option.

    Attributes:
        name: Without the dashes in front.
        text: Its meaning, with which its text in the reference begins.
        kind: How its value is parsed.
        default: Its value where none is given.
        shown: The default in texts, where the value itself does not explain it.
        metavar: Placeholder of the value.
    """

    name: str
    text: str
    kind: ValueKind[object]
    default: object
    shown: str
    metavar: str

    @property
    def help(self) -> str:
        """The text for `--help`."""
        has_default = self.shown_default not in ("false", "no filter", "none")
        return f"{self.text} (default: {self.shown_default})" if has_default else self.text

    @property
    def shown_default(self) -> str:
        """The default as text."""
        if self.shown or self.default in (None, ""):
            return self.shown or "none"
        if isinstance(self.default, tuple):
            return ",".join(map(str, self.default)) or "no filter"
        is_float = isinstance(self.default, float)
        return f"{self.default:g}" if is_float else str(self.default).lower()

    def read(self, config: pytest.Config) -> object:
        """Return the parsed value."""
        value = given(config, self.name)
        return self.default if value is None else self.kind.parse(self.name, value)


def typed(config: pytest.Config, name: str) -> object:
    """Return the value of an option on the command line, else None."""
    value: object = config.getoption(dest(name))
    return None if value is False else value


def given(config: pytest.Config, name: str) -> object:
    """Return the value on the command line, else the one in the ini file, else None."""
    value = typed(config, name)
    return config.getini(dest(name)) if value is None else value


def dest(name: str) -> str:
    """Return the name of an option in the ini file, and in pytest's namespace."""
    return f"megatron_{name.replace('-', '_')}"


def foreign_ini(config: pytest.Config, name: str) -> object:
    """Return an ini value of another plugin where the user set it, else None.

    Its default is not the user's choice, and differs between releases: "", 0.0, None.
    """
    try:
        value: object = config.getini(name)
    except ValueError:  # nobody declares it
        return None
    attributes = vars(config)  # the public name is deprecated from pytest 9.1 on
    in_file = name in attributes.get("_inicfg", attributes.get("inicfg", ()))
    typed_lines = getattr(config.known_args_namespace, "override_ini", None) or ()
    is_typed = any(line.partition("=")[0].strip() == name for line in typed_lines)
    return value if in_file or is_typed else None


@contextlib.contextmanager
def usage_errors() -> Generator[None]:
    """Make usage errors of pytest of the plugin's own errors."""
    try:
        yield
    except MegatronError as error:
        raise pytest.UsageError(str(error)) from None


def has_workers(config: pytest.Config) -> bool:
    """Return true if pytest-xdist hands tests to workers; `--dist` without `-n` does not."""
    option = config.option
    return getattr(option, "dist", "no") != "no" and bool(getattr(option, "tx", None))


def _flag(name: str, value: object) -> bool:
    found = str(value).lower()
    if found in ("true", "1", "yes"):
        return True
    if found in ("", "false", "0", "no"):
        return False
    raise pytest.UsageError(f"{dest(name)}: {found!r} is neither true nor false")


def _count(name: str, value: object, also: str = "") -> int:
    if not str(value).isdecimal() or int(str(value)) < 1:
        raise pytest.UsageError(
            f"--{name}: {value!r} is not a count, expected a number from 1 on{also}"
        )
    return int(str(value))


def _index(name: str, value: object) -> int:
    if not str(value).isdecimal():
        raise pytest.UsageError(f"--{name}: {value!r} is not a number, expected one from 0 on")
    return int(str(value))


def _seconds(name: str, value: object) -> float:
    return seconds_of(str(value), f"--{name}")


def seconds_of(value: object, where: str, more: str = "") -> float:
    """Return a time.

    Raises:
        pytest.UsageError: It is none.
    """
    try:
        seconds = float(str(value))
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise pytest.UsageError(
            f"{where}: {value!r} is not a time, expected seconds from 0 on{more}"
        )
    return seconds


def _words(name: str, value: object) -> tuple[str, ...]:
    lists = value if isinstance(value, Sequence) and not isinstance(value, str) else [str(value)]
    found = [word.strip() for line in lists for word in str(line).split(",")]
    if not all(found):
        raise pytest.UsageError(f"--{name}: {','.join(map(str, lists))!r} holds an empty word")
    return tuple(found)


def _ranks(name: str, value: object) -> tuple[int, ...] | None:
    found = str(value)
    if found in ("all", "none"):
        return None if found == "all" else ()
    numbers = [word.strip() for word in found.split(",")]
    if not all(word.isdecimal() for word in numbers):
        raise pytest.UsageError(
            f"--{name}: {found!r} names no ranks, expected numbers with commas, all or none"
        )
    return tuple(sorted({int(word) for word in numbers}))


def one_of(*choices: ChoiceT, problem: str = "is unknown") -> ValueKind[ChoiceT]:
    """Return the kind of a value that is one of `choices`."""

    def parse(name: str, value: object) -> ChoiceT:
        for choice in choices:
            if choice == value:
                return choice
        expected = ", ".join(sorted(choices))
        raise pytest.UsageError(f"--{name}: {str(value)!r} {problem}, expected one of {expected}")

    return ValueKind(parse, "|".join(choices))


TEXT = ValueKind(lambda _, value: str(value), "TEXT")
PATH = ValueKind(lambda _, value: Path(str(value)) if value else None, "PATH")
FLAG = ValueKind(_flag)
COUNT = ValueKind(_count, "N")
INDEX = ValueKind(_index, "N")
SECONDS = ValueKind(_seconds, "S")
WORDS = ValueKind(_words, "LIST", is_repeatable=True)
FILES = ValueKind(lambda name, v: tuple(map(Path, _words(name, v))), "FILE", is_repeatable=True)
REASON = ValueKind(lambda _, value: str(value).strip() or None, "TEXT")
RANKS = ValueKind(_ranks, "LIST")
GPUS = ValueKind(lambda name, v: 0 if v == "all" else _count(name, v, ", or all"), "N|all")


def findable(arguments: Sequence[str], directory: str) -> list[str]:
    """Return arguments without the directory where pytest would take its name for a node id's.

    Without arguments, pytest names the directory in full; it splits at `::` and `[` before it looks
    for a file.
    """
    if "::" not in directory and "[" not in directory:
        return list(arguments)
    start = f"{directory}{os.sep}"
    return ["." if a == directory else a.removeprefix(start) for a in arguments]

"""Values of options: from the command line, else from the ini file; a wrong one is a usage error.

Runs at every pytest start, so it imports nothing but pytest.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest


def dest(name: str) -> str:
    """Return the name of an option in the ini file, and in pytest's namespace."""
    return f"megatron_{name.replace('-', '_')}"


def typed(config: pytest.Config, name: str) -> object:
    """Return what the command line says, None where it says nothing."""
    value: object = config.getoption(dest(name))
    return value


def given(config: pytest.Config, name: str) -> object:
    """Return what the command line says, else what the ini file says, else None."""
    value = typed(config, name)
    return config.getini(dest(name)) if value is None or value is False else value


def foreign_ini(config: pytest.Config, name: str) -> object:
    """Return an ini value of another plugin where the user set it, else None.

    Its default is no word of the user's, and differs between releases: "", 0.0, None.
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


def has_workers(config: pytest.Config) -> bool:
    """Whether pytest-xdist hands tests to workers; a project may have `--dist` without `-n`."""
    option = config.option
    return getattr(option, "dist", "no") != "no" and bool(getattr(option, "tx", None))


def text(config: pytest.Config, name: str, default: str) -> str:
    """Return a value as it is written."""
    value = given(config, name)
    return default if value is None else str(value)


def flag(config: pytest.Config, name: str) -> bool:
    """Return a value that is true or false."""
    found = str(given(config, name)).lower()
    if found in ("true", "1", "yes"):
        return True
    if found in ("none", "", "false", "0", "no"):
        return False
    raise pytest.UsageError(f"{dest(name)}: {found!r} is neither true nor false")


def count(config: pytest.Config, name: str) -> int | None:
    """Return a number from 1 on, None where none is given."""
    value = given(config, name)
    if value is None:
        return None
    if not str(value).isdecimal() or int(str(value)) < 1:
        raise pytest.UsageError(f"--{name}: {value!r} is not a count, expected a number from 1 on")
    return int(str(value))


def index(config: pytest.Config, name: str) -> int | None:
    """Return a number from 0 on, None where none is given."""
    value = given(config, name)
    if value is None:
        return None
    if not str(value).isdecimal():
        raise pytest.UsageError(f"--{name}: {value!r} is not a number, expected one from 0 on")
    return int(str(value))


def seconds(config: pytest.Config, name: str, default: float) -> float:
    """Return a time."""
    found = text(config, name, str(default))
    try:
        value = float(found)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise pytest.UsageError(f"--{name}: {found!r} is not a time, expected seconds from 0 on")
    return value


def choice(config: pytest.Config, name: str, choices: Sequence[str]) -> str:
    """Return one of `choices`; the first is the default."""
    found = text(config, name, choices[0])
    if found not in choices:
        raise pytest.UsageError(
            f"--{name}: {found!r} is unknown, expected one of {', '.join(sorted(choices))}"
        )
    return found


def gpus(config: pytest.Config) -> int | None:
    """Return how many GPUs are asked for: 0 is all of them, None none."""
    value = given(config, "gpus")
    if value in (None, "all"):
        return None if value is None else 0
    if not str(value).isdecimal() or int(str(value)) < 1:
        raise pytest.UsageError(
            f"--gpus: {value!r} is not a count, expected a number from 1 on, or all"
        )
    return int(str(value))


def words(config: pytest.Config, name: str) -> tuple[str, ...]:
    """Return the words of an option that may be repeated or hold several with commas."""
    value = given(config, name)
    if value is None:
        return ()
    lists = value if isinstance(value, Sequence) and not isinstance(value, str) else [str(value)]
    found = [word.strip() for line in lists for word in str(line).split(",")]
    if not all(found):
        raise pytest.UsageError(f"--{name}: {','.join(map(str, lists))!r} holds an empty word")
    return tuple(found)


def ranks(found: str) -> tuple[int, ...] | None:
    """Return the ranks of `--tee-ranks`; None is all of them."""
    if found == "all":
        return None
    if found == "none":
        return ()
    numbers = [word.strip() for word in found.split(",")]
    if not all(word.isdecimal() for word in numbers):
        raise pytest.UsageError(
            f"--tee-ranks: {found!r} names no ranks, expected numbers with commas, all or none"
        )
    return tuple(sorted({int(word) for word in numbers}))


def findable(arguments: Sequence[str], directory: str) -> list[str]:
    """Return arguments without the directory where pytest would take its name for a node id's.

    Without arguments, pytest names the directory in full; it splits at `::` and `[` before it looks
    for a file.
    """
    if "::" not in directory and "[" not in directory:
        return list(arguments)
    start = f"{directory}{os.sep}"
    return ["." if a == directory else a.removeprefix(start) for a in arguments]

"""From marks to the gang that a test needs; errors name the test."""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest
from _pytest.doctest import DoctestItem

from pytest_megatron.gang.spec import GangSpec
from pytest_megatron.hooks.option_values import foreign_ini
from pytest_megatron.hooks.options import Options

SIZE_FIXTURE = "_megatron_world_size"
QUARANTINE = "quarantine"
_LINES = (
    "world_size(n, ...): run on a gang of n ranks; several numbers parametrise",
    "controller: run in the pytest process that was started, on no gang",
    "isolated: run on a gang of fresh processes that runs nothing else",
    "rerun_transient(n): rerun a test on a gang up to n times after a transient failure",
    "quarantine(reason, until): a failure does not fail the run up to that day, '2026-12-31'",
)

_TIMEOUT_PLUGINS = ("timeout", "pytest_timeout")  # the second one if `-p` loads it
_TIMEOUT_LINE = "timeout(s): limit for each phase of a test on a gang, in seconds; 0 is none"


def declare_marks(config: pytest.Config) -> None:
    """Tell pytest of the marks."""
    for line in _LINES:
        config.addinivalue_line("markers", line)
    if not _has_timeout_plugin(config):  # which declares it itself
        config.addinivalue_line("markers", _TIMEOUT_LINE)


def asks_for_gang(item: pytest.Item) -> bool:
    """Whether a test has a mark that asks for a gang, right or wrong."""
    return any(item.get_closest_marker(name) is not None for name in ("world_size", "isolated"))


def is_quarantined_by_us(item: pytest.Item) -> bool:
    """Whether a test has our mark, and not one of the same name that a project uses for itself."""
    mark = item.get_closest_marker(QUARANTINE)
    return mark is not None and not mark.kwargs.keys().isdisjoint(("reason", "until"))


def parametrise_sizes(metafunc: pytest.Metafunc) -> None:
    """Make a test of each number that `world_size` names, if it names several.

    A wrong mark is left alone: `spec_of` says so, where it is a usage error.
    """
    mark = metafunc.definition.get_closest_marker("world_size")
    sizes = None if mark is None else _numbers(mark)
    if sizes is None or len(sizes) == 1:
        return
    metafunc.fixturenames.append(SIZE_FIXTURE)
    metafunc.parametrize(SIZE_FIXTURE, sizes, indirect=True, ids=[f"world{n}" for n in sizes])


def spec_of(
    item: pytest.Item, options: Options, *, default_size: int, room: int
) -> GangSpec | None:
    """Return the gang that an item runs on, or None for the controller.

    Args:
        item: A collected item.
        options: What the user asked for.
        default_size: World size of tests without a mark; 0 if they stay in the controller.
        room: Ranks of one gang that the GPUs of this host can take.

    Raises:
        pytest.UsageError: A mark is wrong.
    """
    if not isinstance(item, pytest.Function | DoctestItem):
        return None
    for name in ("controller", "isolated"):
        plain = item.get_closest_marker(name)
        if plain is not None and (plain.args or plain.kwargs):
            given = ", ".join([*map(repr, plain.args), *map(repr, plain.kwargs)])
            raise pytest.UsageError(
                f"{item.nodeid}: mark {name}: {given} is given, expected nothing; use world_size "
                f"to choose a number of ranks"
            )
    if item.get_closest_marker("controller") is not None:
        return None
    num_reruns_of(item, 0)  # a wrong mark is an error before anything runs
    mark = item.get_closest_marker("world_size")
    is_isolated = item.get_closest_marker("isolated") is not None
    size = default_size
    if mark is not None:
        size = _chosen_size(item, mark)
    elif is_isolated:
        size = default_size or 1
    if size == 0:
        return None
    return GangSpec(
        world_size=size,
        device=device_of(options, size, room),
        is_isolated=is_isolated,
    )


def num_reruns_of(item: pytest.Item, default: int) -> int:
    """Return how often a test may run again after transient failures: its mark wins.

    Raises:
        pytest.UsageError: The mark is wrong.
    """
    mark = item.get_closest_marker("rerun_transient")
    if mark is None:
        return default
    number = mark.args[0] if len(mark.args) == 1 and not mark.kwargs else None
    if type(number) is not int or number < 0:
        raise pytest.UsageError(
            f"{item.nodeid}: mark rerun_transient: {_arguments_of(mark)} is given, "
            f"expected one number of reruns from 0 on"
        )
    return number


@dataclass(frozen=True, slots=True)
class TimeLimit:
    """How long a phase of a test may take, and who says so.

    Attributes:
        seconds: 0 is no limit.
        source: What the user would change.
    """

    seconds: float
    source: str


def timeout_of(item: pytest.Item, options: Options) -> float:
    """Return the limit of a phase: a `timeout` mark wins, as long as it has a time.

    Raises:
        pytest.UsageError: It is no time.
    """
    mark = item.get_closest_marker("timeout")
    found: object = None
    if mark is not None:
        found = mark.args[0] if mark.args else mark.kwargs.get("timeout")
    if found is None:  # the mark may only choose pytest-timeout's method
        return limit_of_session(item.config, options).seconds
    return _seconds(found, f"{item.nodeid}: mark timeout")


def limit_of_session(config: pytest.Config, options: Options) -> TimeLimit:
    """Return the limit of tests without a mark.

    What is typed for us wins, then what is set for pytest-timeout, then our default.

    Raises:
        pytest.UsageError: It is no time.
    """
    if "rank-timeout" not in options.given and _has_timeout_plugin(config):
        settings: dict[str, object] = {
            "--timeout": config.getoption("timeout", None),
            "PYTEST_TIMEOUT": os.environ.get("PYTEST_TIMEOUT"),
            "timeout in the ini file": foreign_ini(config, "timeout"),
        }
        for source, value in settings.items():
            if value not in (None, ""):
                return TimeLimit(_seconds(value, source), source)
    return TimeLimit(options.rank_timeout_s, "--rank-timeout")


def _has_timeout_plugin(config: pytest.Config) -> bool:
    return any(map(config.pluginmanager.has_plugin, _TIMEOUT_PLUGINS))


def _seconds(found: object, where: str) -> float:
    try:
        seconds = float(str(found))
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise pytest.UsageError(
            f"{where}: {found!r} is not a time, expected seconds from 0 on (0 is no limit)"
        )
    return seconds


def _chosen_size(item: pytest.Item, mark: pytest.Mark) -> int:
    sizes = _numbers(mark)
    if sizes is None:
        raise pytest.UsageError(
            f"{item.nodeid}: mark world_size: {_arguments_of(mark)} is given, "
            f"expected numbers of ranks from 1 on"
        )
    if len(sizes) == 1:
        return sizes[0]
    callspec = getattr(item, "callspec", None)
    if callspec is None or SIZE_FIXTURE not in callspec.params:
        raise pytest.UsageError(
            f"{item.nodeid}: mark world_size has several numbers, {sizes}, and this kind of test "
            f"cannot be parametrised; give one"
        )
    return int(callspec.params[SIZE_FIXTURE])


def _arguments_of(mark: pytest.Mark) -> str:
    """Return the arguments of a mark as they were typed, or `nothing`."""
    given = [*map(repr, mark.args), *(f"{k}={v!r}" for k, v in mark.kwargs.items())]
    return ", ".join(given) or "nothing"


def _numbers(mark: pytest.Mark) -> list[int] | None:
    """Return the numbers of a `world_size` mark, or None where it is wrong."""
    numbers = [number for a in mark.args for number in (a if isinstance(a, list | tuple) else [a])]
    is_right = numbers and all(type(n) is int and n > 0 for n in numbers) and not mark.kwargs
    return numbers if is_right else None


def device_of(options: Options, size: int, room: int) -> str:
    """Return `cuda` or `cpu` for a gang.

    Args:
        options: What the user asked for.
        size: Its world size.
        room: Ranks of one gang that the GPUs of this host can take.
    """
    if options.num_gpus is not None:
        return "cuda"
    if options.device != "auto":
        return options.device
    per_node = max(-(-size // options.num_nodes), min(size, options.num_ranks or 0))
    return "cuda" if room >= per_node else "cpu"

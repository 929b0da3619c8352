"""Markers of tests, and the gang that a test needs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from _pytest.doctest import DoctestItem

from pytest_megatron.gangs.topology import GangSpec
from pytest_megatron.session.options import Options, seconds_of
from pytest_megatron.session.time_limit import (
    NO_LIMIT,
    TimeLimit,
    has_timeout_plugin,
    is_of_call,
    limit_of_session,
)

SIZE_FIXTURE = "_megatron_world_size"
QUARANTINE = "quarantine"
_LINES = (
    "world_size(n, ...): run on a gang of n ranks; several numbers parametrise",
    "controller: run in the pytest process that was started, on no gang",
    "isolated: run on a gang of fresh processes that runs nothing else",
    "quarantine(reason, until): a failure does not fail the run up to that day, '2026-12-31'",
)

_TIMEOUT_LINE = (
    "timeout(s, func_only=False): limit for each phase of a test on a gang, in seconds; 0 is none"
)


def declare_marks(config: pytest.Config) -> None:
    """Register the markers with pytest."""
    for line in _LINES:
        config.addinivalue_line("markers", line)
    if not has_timeout_plugin(config):  # which declares it
        config.addinivalue_line("markers", _TIMEOUT_LINE)


def asks_for_gang(item: pytest.Item) -> bool:
    """Return whether a test has a marker that requests a gang, valid or not."""
    return any(item.get_closest_marker(name) is not None for name in ("world_size", "isolated"))


def is_quarantined_by_us(item: pytest.Item) -> bool:
    """Return whether a test has the `quarantine` marker of this plugin, not a project's own."""
    mark = item.get_closest_marker(QUARANTINE)
    return mark is not None and not mark.kwargs.keys().isdisjoint(("reason", "until"))


def parametrise_sizes(metafunc: pytest.Metafunc) -> None:
    """Parametrise a test by the numbers of `world_size`, if there are several.

    A wrong marker is ignored here: `spec_of` raises a usage error.
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
        options: Options of the session.
        default_size: World size of tests without a marker; 0 if they run in the controller.
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
    mark = item.get_closest_marker("world_size")
    is_isolated = item.get_closest_marker("isolated") is not None
    size = default_size
    if mark is not None:
        size = _chosen_size(item, mark)
    elif is_isolated:
        size = default_size or 1
    if size == 0:
        return None
    device = device_of(options, size, room)
    return GangSpec(world_size=size, device=device, is_isolated=is_isolated)


def limit_of(item: pytest.Item, options: Options) -> float:
    """Return the limit of each phase of a test, in seconds; 0 is no limit.

    One that pytest-timeout has for the call alone does not shorten ours, as fixtures may take more.

    Raises:
        pytest.UsageError: A limit is no time, or `func_only` of a mark is neither true nor false.
    """
    limit = _limit_of(item, options)
    if limit.is_of_call and limit.seconds and options.rank_timeout_s:
        return max(options.rank_timeout_s, limit.seconds)
    return 0.0 if limit.is_of_call else limit.seconds


def _limit_of(item: pytest.Item, options: Options) -> TimeLimit:
    """Return the limit of a test: a `timeout` mark wins, as long as it has a time."""
    mark = item.get_closest_marker("timeout")
    if mark is None:
        return limit_of_session(item.config, options)
    seconds = mark.args[0] if mark.args else mark.kwargs.get("timeout")
    of_call = mark.kwargs.get("func_only")
    if not (of_call is None or isinstance(of_call, bool)):
        problem = f"func_only is {of_call!r}, expected True or False"
        raise pytest.UsageError(f"{item.nodeid}: mark timeout: {problem}")
    if seconds is None:  # the mark may only choose pytest-timeout's method
        limit = limit_of_session(item.config, options)
    else:
        where = f"{item.nodeid}: mark timeout"
        limit = TimeLimit(seconds_of(seconds, where, NO_LIMIT), is_of_call(item.config))
    return limit if of_call is None else replace(limit, is_of_call=of_call)


def _chosen_size(item: pytest.Item, mark: pytest.Mark) -> int:
    """Return the world size of an item, by its mark `world_size`."""
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
    """Return the numbers of a `world_size` marker, or None if it is wrong."""
    numbers = [number for a in mark.args for number in (a if isinstance(a, list | tuple) else [a])]
    is_right = numbers and all(type(n) is int and n > 0 for n in numbers) and not mark.kwargs
    return numbers if is_right else None


def device_of(options: Options, size: int, room: int) -> str:
    """Return `cuda` or `cpu` for a gang.

    Args:
        options: Options of the session.
        size: World size of the test.
        room: Ranks of one gang that the GPUs of this host can take.
    """
    if options.num_gpus is not None:
        return "cuda"
    if options.device != "auto":
        return options.device
    per_node = max(-(-size // options.num_nodes), min(size, options.num_ranks or 0))
    return "cuda" if room >= per_node else "cpu"

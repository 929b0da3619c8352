"""From marks to the gang that a test needs; errors name the test."""

from __future__ import annotations

import pytest
from _pytest.doctest import DoctestItem

from pytest_megatron.gang.spec import GangSpec
from pytest_megatron.hooks.options import Options

SIZE_FIXTURE = "_megatron_world_size"
_LINES = (
    "world_size(n, ...): run on a gang of n ranks; several numbers parametrise",
    "controller: run in the pytest process that was started, on no gang",
    "isolated: run on a gang of fresh processes that runs nothing else",
)


def declare_marks(config: pytest.Config) -> None:
    """Tell pytest of the marks."""
    for line in _LINES:
        config.addinivalue_line("markers", line)


def parametrise_sizes(metafunc: pytest.Metafunc) -> None:
    """Make a test of each number that `world_size` names, if it names several."""
    mark = metafunc.definition.get_closest_marker("world_size")
    if mark is None or len(sizes := _sizes(mark, metafunc.definition.nodeid)) == 1:
        return
    metafunc.fixturenames.append(SIZE_FIXTURE)
    metafunc.parametrize(SIZE_FIXTURE, sizes, indirect=True, ids=[f"world{n}" for n in sizes])


def spec_of(
    item: pytest.Item, options: Options, *, default_size: int, num_gpus: int
) -> GangSpec | None:
    """Return the gang that an item runs on, or None for the controller.

    Args:
        item: A collected item.
        options: What the user asked for.
        default_size: World size of tests without a mark; 0 if they stay in the controller.
        num_gpus: CUDA devices of this host.

    Raises:
        pytest.UsageError: A mark is wrong.
    """
    if not isinstance(item, pytest.Function | DoctestItem):
        return None
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
    return GangSpec(
        world_size=size,
        device=_device(options, size, num_gpus),
        is_isolated=is_isolated,
    )


def timeout_of(item: pytest.Item, default_s: float) -> float:
    """Return the limit of a phase: a `timeout` mark wins, then pytest-timeout's own settings."""
    mark = item.get_closest_marker("timeout")
    found: object = None
    if mark is not None:
        found = mark.args[0] if mark.args else mark.kwargs.get("timeout")
    elif item.config.pluginmanager.has_plugin("timeout"):
        found = item.config.getoption("timeout", None) or item.config.getini("timeout")
    if found in (None, ""):
        return default_s
    try:
        return max(0.0, float(str(found)))
    except ValueError:
        raise pytest.UsageError(
            f"{item.nodeid}: mark timeout takes seconds, found {found!r}"
        ) from None


def _chosen_size(item: pytest.Item, mark: pytest.Mark) -> int:
    sizes = _sizes(mark, item.nodeid)
    if len(sizes) == 1:
        return sizes[0]
    callspec = getattr(item, "callspec", None)
    if callspec is None or SIZE_FIXTURE not in callspec.params:
        raise pytest.UsageError(
            f"{item.nodeid}: mark world_size has several numbers, {sizes}, and this kind of test "
            f"cannot be parametrised; give one"
        )
    return int(callspec.params[SIZE_FIXTURE])


def _sizes(mark: pytest.Mark, where: str) -> list[int]:
    numbers = [number for a in mark.args for number in (a if isinstance(a, list | tuple) else [a])]
    is_right = numbers and all(type(n) is int and n > 0 for n in numbers) and not mark.kwargs
    if not is_right:
        raise pytest.UsageError(
            f"{where}: mark world_size takes numbers of ranks from 1 on, found "
            f"{', '.join(map(repr, mark.args)) or 'none'}"
        )
    return numbers


def _device(options: Options, size: int, num_gpus: int) -> str:
    if options.num_gpus is not None:
        return "cuda"
    if options.device != "auto":
        return options.device
    per_node = max(-(-size // options.num_nodes), min(size, options.num_ranks or 0))
    return "cuda" if num_gpus >= per_node else "cpu"

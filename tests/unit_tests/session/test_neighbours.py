"""Other plugins that would silently hold nothing of ranks: refused or said."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import cast

import pytest

from pytest_megatron.gangs.controller.other_plugins import (
    decode,
    draw_same_examples,
    encode,
    is_of_phases,
    keep_unused_snapshots,
    lines_on_limits,
)
from pytest_megatron.gangs.ipc.messages import RankConfig
from pytest_megatron.gangs.rank import bootstrap


class Plugins:
    """Knows which plugins there are."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def has_plugin(self, name: str) -> bool:
        return name in self.names


def config_with(*plugins: str, **options: object) -> pytest.Config:
    made = SimpleNamespace(option=SimpleNamespace(**options), pluginmanager=Plugins(*plugins))
    if "syrupy" in plugins:
        made._syrupy = object()
    return cast("pytest.Config", made)


def item_with(*fixtures: str, mark: str = "") -> pytest.Item:
    def closest(name: str) -> object:
        return object() if name == mark else None

    made = SimpleNamespace(nodeid="test_a.py::test_a", fixturenames=fixtures)
    made.get_closest_marker = closest
    return cast("pytest.Item", made)


def test_one_line_names_the_plugins_that_do_less_on_ranks() -> None:
    names = ("allure_listener", "benchmark", "syrupy")
    config = config_with(*names, inline_snapshot="short-report,fix")
    (said,) = lines_on_limits(config, [item_with("benchmark"), item_with("rank", "snapshot")])
    assert ": allure, inline-snapshot, pytest-benchmark, syrupy; @pytest.mark.controller " in said
    assert lines_on_limits(config, []) == []
    config = config_with("benchmark", "syrupy")
    assert lines_on_limits(config, [item_with("rank")]) == []
    assert lines_on_limits(config_with(), [item_with("benchmark")]) == []  # somebody else's


@pytest.mark.parametrize("flags", [None, "", "disable", "short-report"])
def test_inline_snapshots_that_are_only_compared_are_fine(flags: str | None) -> None:
    assert lines_on_limits(config_with(inline_snapshot=flags), [item_with()]) == []


@pytest.mark.parametrize(("mark", "is_typed"), [("", True), ("forked", False), ("", False)])
def test_a_fork_of_the_controller_is_refused(mark: str, *, is_typed: bool) -> None:
    config, items = config_with("pytest_forked", forked=is_typed), [item_with(mark=mark)]
    if mark or is_typed:
        told = "pytest-forked: test_a.py::test_a runs on ranks"
        with pytest.raises(pytest.UsageError, match=told):
            lines_on_limits(config, items)
    else:
        assert lines_on_limits(config, items) == []
    assert lines_on_limits(config, []) == []


def test_snapshots_of_controllers_tests_alone_are_looked_through_for_unused_ones() -> None:
    config = config_with("syrupy", update_snapshots=True)
    keep_unused_snapshots(config, [item_with("rank")])
    assert vars(config.option) == {"update_snapshots": True}
    keep_unused_snapshots(config, [item_with("snapshot")])
    assert not config.option.update_snapshots
    assert config.option.disable_unused_snapshots


def order_of(rank: int, run_id: str) -> RankConfig:
    env = {"TORCHELASTIC_RUN_ID": run_id}
    return RankConfig(
        gang=1,
        rank=rank,
        world_size=2,
        node_rank=0,
        device="cpu",
        env=env,
        log_dir="",
        base_temp="",
    )


def test_ranks_of_a_run_draw_the_same_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    def seed(rank: int, run_id: str, typed: object = None) -> object:
        core = ModuleType("hypothesis.core")
        core.__dict__["global_force_seed"] = typed
        monkeypatch.setitem(sys.modules, "hypothesis.core", core)
        draw_same_examples(order_of(rank, run_id))
        return core.__dict__["global_force_seed"]

    assert isinstance(seed(0, "run1"), int)
    assert seed(0, "run1") == seed(1, "run1")
    assert seed(0, "run1") != seed(0, "run2")
    assert seed(0, "run1", typed=7) == 7


def test_torch_is_seeded_in_ranks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    monkeypatch.setattr(sys.modules["torch"], "manual_seed", seeds.append, raising=False)
    bootstrap.seed_torch(1)
    assert seeds == []
    monkeypatch.setattr(bootstrap, "_device", "cpu")
    bootstrap.seed_torch(2)
    assert seeds == [2]


class Wraps:
    def pytest_runtest_call(self) -> None: ...


class OnlyReports:
    def pytest_runtest_makereport(self) -> None: ...


def test_who_wraps_phases_had_its_part_in_the_ranks() -> None:
    assert is_of_phases(Wraps())
    assert not is_of_phases(OnlyReports())


@pytest.mark.parametrize(
    "value", [1, 1.5, -2, True, None, "ü\n", b"\xff", [1, (2,)], {"a": {1, 2}}, {3: {}}, 10**30]
)
def test_what_plugins_send_comes_back_as_it_was(value: object) -> None:
    assert decode(encode({"name": value})) == {"name": value}


@pytest.mark.parametrize("value", [object(), Path(), random.Random(), float("nan"), len])
def test_what_cannot_be_sent_is_named(value: object) -> None:
    with pytest.raises(pytest.UsageError, match="a plugin sends workers 'name' as"):
        encode({"name": value})

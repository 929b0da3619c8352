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
    refuse_what_is_lost,
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


def test_a_benchmark_on_ranks_is_said_to_be_unmeasured() -> None:
    config = config_with("benchmark", benchmark_json=None, benchmark_only=False)
    (said,) = refuse_what_is_lost(config, [item_with("benchmark"), item_with("rank")])
    assert said.startswith("pytest-benchmark: test_a.py::test_a is on ranks not measured")
    assert refuse_what_is_lost(config, [item_with("rank")]) == []
    assert refuse_what_is_lost(config_with(), [item_with("benchmark")]) == []  # somebody else's


@pytest.mark.parametrize("option", ["benchmark_json", "benchmark_only", "benchmark_compare_fail"])
def test_results_of_benchmarks_on_ranks_are_refused(option: str) -> None:
    config = config_with("benchmark", **{option: "x"})
    with pytest.raises(pytest.UsageError, match=f"--{option.replace('_', '-')}: test_a.py::test_a"):
        refuse_what_is_lost(config, [item_with("benchmark")])
    assert refuse_what_is_lost(config, [item_with("rank")]) == []


@pytest.mark.parametrize("flags", ["create", "short-report,fix", "review"])
def test_inline_snapshots_of_ranks_cannot_be_written(flags: str) -> None:
    config = config_with(inline_snapshot=flags)
    with pytest.raises(pytest.UsageError, match="run without ranks"):
        refuse_what_is_lost(config, [item_with()])
    assert refuse_what_is_lost(config, []) == []


@pytest.mark.parametrize("flags", [None, "", "disable", "short-report"])
def test_inline_snapshots_that_are_only_compared_are_fine(flags: str | None) -> None:
    assert refuse_what_is_lost(config_with(inline_snapshot=flags), [item_with()]) == []


@pytest.mark.parametrize(
    ("mark", "is_typed", "said"),
    [("", True, "--forked: "), ("forked", False, "@pytest.mark.forked: "), ("", False, "")],
)
def test_a_fork_of_the_controller_is_refused(mark: str, said: str, *, is_typed: bool) -> None:
    config, items = config_with("pytest_forked", forked=is_typed), [item_with(mark=mark)]
    if said:
        with pytest.raises(pytest.UsageError, match=f"{said}test_a.py::test_a runs on ranks"):
            refuse_what_is_lost(config, items)
    else:
        assert refuse_what_is_lost(config, items) == []
    assert refuse_what_is_lost(config, []) == []


def test_allure_says_what_it_leaves_out() -> None:
    assert refuse_what_is_lost(config_with("allure_listener"), []) == []
    (said,) = refuse_what_is_lost(config_with("allure_listener"), [item_with()])
    assert "steps and attachments of ranks are left out" in said


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

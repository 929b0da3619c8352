"""`--stress`: repeats of distributed tests under another order and other timing."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from gang_suite import Suite

from pytest_megatron.gangs.stress import StressPlugin, describe_rate
from pytest_megatron.runs.history import wilson_interval
from pytest_megatron.session.options import Options

RACE = """
    import pytest
    import torch
    import torch.distributed as dist

    @pytest.mark.parametrize("size", [2])
    def test_waits(rank, process_group, shared_tmp_path, size):
        if rank == 0:
            (shared_tmp_path / "file").touch()
        dist.barrier()
        assert (shared_tmp_path / "file").exists()
    """
HURRY = """
    import pytest

    def test_hurries(rank, shared_tmp_path):
        if rank == 0:
            (shared_tmp_path / "file").touch()
        else:
            assert (shared_tmp_path / "file").exists()

    @pytest.mark.controller
    def test_once():
        ...
    """


# Source: Newcombe, Two-sided confidence intervals for the single proportion, 1998, table I.
@pytest.mark.parametrize(
    ("num_failed", "number", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_the_interval_is_wilsons(num_failed: int, number: int, low: float, high: float) -> None:
    assert wilson_interval(num_failed, number) == pytest.approx((low, high), abs=5e-5)


def test_a_test_that_always_fails_has_a_rate_below_one_in_its_interval() -> None:
    assert describe_rate(3, 3) == "failed in 3 of 3 runs, 100.0% (95 %: 43.9% to 100.0%)"


def test_a_race_is_found_and_its_rate_reported(tmp_path: Path) -> None:
    suite = Suite(tmp_path).write(test_race=RACE, test_hurry=HURRY)
    words = (
        "-v",
        "--ranks",
        "2",
        "--device",
        "cpu",
        "--stress",
        "12",
        "-o",
        "megatron_stress_seed=3",
    )
    done = suite.run(*words)
    assert done.returncode == 1, done.stdout
    assert "test_race.py::test_waits[2]: failed in 0 of 12 runs, 0.0% (95 %: " in done.stdout
    found = re.search(r"test_hurry.py::test_hurries: failed in (\d+) of 12 runs", done.stdout)
    assert found is not None
    assert 0 < int(found[1]) <= 12
    assert done.words["test_once"] == "PASSED"
    order = [line.partition(" ")[0] for line in done.lines]
    assert len(set(order)) == 25
    assert order != sorted(order)
    failed = next(name for name, word in done.words.items() if word == "FAILED")
    again = suite.run(*words, f"test_hurry.py::{failed}")
    assert list(again.words) == [failed]
    line = re.search("^reproduce: pytest (.*)", again.stdout, re.MULTILINE)
    assert line is not None
    assert line[1].endswith(f"{' '.join(words)} 'test_hurry.py::{failed}'")


@dataclass
class Repeat:
    """An item of a distributed test, as far as its place goes."""

    nodeid: str
    callspec: SimpleNamespace = field(
        default_factory=lambda: SimpleNamespace(params={"_megatron_stress": 1})
    )


def test_the_order_is_that_of_the_seed_whatever_other_plugins_did(
    pytestconfig: pytest.Config,
) -> None:
    """pytest-randomly shuffles before, with another seed each time."""
    items = [Repeat(f"test_a.py::test_b[repeat{n}]") for n in range(9)]
    orders = []
    options = cast("Options", SimpleNamespace(stress_seed=3))
    for given in (items, items[::-1]):
        sorted_out = cast("list[pytest.Item]", list(given))
        StressPlugin(pytestconfig, options).pytest_collection_modifyitems(sorted_out)
        orders.append([item.nodeid for item in sorted_out])
    assert orders[0] == orders[1]
    assert orders[0] != [item.nodeid for item in items]


def test_a_session_without_distributed_tests_repeats_nothing_and_reports_so(tmp_path: Path) -> None:
    done = Suite(tmp_path).write(test_a="def test_a(): ...").run("-v", "--stress", "3")
    assert "no distributed test ran, so --stress repeated nothing; give --ranks" in done.stdout
    assert "(tests of unittest and doctests run once)" in done.stdout
    assert list(done.words) == ["test_a"]

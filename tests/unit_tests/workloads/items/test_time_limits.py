"""Who limits the time of a test on a gang: marks, our option, pytest-timeout, our default."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Protocol

import pytest
from _pytest.config import _prepareconfig
from gang_suite import Suite

from pytest_megatron.session.options import read_options
from pytest_megatron.session.time_limit import TimeLimit, limit_of_session

# How releases of pytest-timeout declare their settings; 2.5 types the value in the ini file.
DECLARATIONS = {
    "2.4": """
        def pytest_addoption(parser):
            parser.addoption("--timeout", type=float)
            parser.addini("timeout", "")
    """,
    "2.5": """
        def pytest_addoption(parser):
            parser.addoption("--timeout", type=float)
            parser.addini("timeout", "", type="float")
    """,
}
OUR_DEFAULT = TimeLimit(300.0)


class Limit(Protocol):
    def __call__(self, *arguments: str, ini: str = "") -> TimeLimit: ...


@pytest.fixture(params=DECLARATIONS)
def limit(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Limit]:
    """Return the limit of a session that has pytest-timeout, from arguments and lines of an ini."""
    (tmp_path / "pytest_timeout.py").write_text(dedent(DECLARATIONS[request.param]))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "pytest_timeout", raising=False)
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.delenv("PYTEST_TIMEOUT", raising=False)
    monkeypatch.chdir(tmp_path)
    configs = []

    def find(*arguments: str, ini: str = "") -> TimeLimit:
        (tmp_path / "pytest.ini").write_text(f"[pytest]\n{ini}\n")
        config = _prepareconfig(["-p", "megatron", *arguments])
        configs.append(config)
        return limit_of_session(config, read_options(config))

    yield find
    for config in configs:
        config._ensure_unconfigure()
    sys.modules.pop("pytest_timeout", None)


def test_nothing_set_is_our_default(limit: Limit) -> None:
    assert limit() == OUR_DEFAULT


def test_what_is_typed_for_us_wins(limit: Limit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_TIMEOUT", "7")
    ours = TimeLimit(15.0)
    assert limit("--rank-timeout=15") == ours
    assert limit("--rank-timeout=15", "--timeout=3", ini="timeout = 4") == ours
    assert limit("--timeout=3", ini="timeout = 4\nmegatron_rank_timeout = 15") == ours
    assert limit("--rank-timeout=300", "--timeout=3") == OUR_DEFAULT


def test_what_is_set_for_pytest_timeout_wins_over_our_default(
    limit: Limit, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert limit(ini="timeout = 4") == TimeLimit(4.0)
    assert limit("-o", "timeout=5") == TimeLimit(5.0)
    monkeypatch.setenv("PYTEST_TIMEOUT", "7")
    assert limit(ini="timeout = 4") == TimeLimit(7.0)
    assert limit("--timeout=3", ini="timeout = 4") == TimeLimit(3.0)


def test_a_zero_that_is_set_is_no_limit(limit: Limit, monkeypatch: pytest.MonkeyPatch) -> None:
    assert limit(ini="timeout = 0") == TimeLimit(0.0)
    assert limit("-o", "timeout=0") == TimeLimit(0.0)
    assert limit("--timeout=0") == TimeLimit(0.0)
    assert limit("--rank-timeout=0", "--timeout=3") == TimeLimit(0.0)
    monkeypatch.setenv("PYTEST_TIMEOUT", "0")
    assert limit() == TimeLimit(0.0)


@pytest.mark.parametrize("limit", ["2.4"], indirect=True)
def test_a_time_that_is_none_is_refused(limit: Limit) -> None:
    with pytest.raises(pytest.UsageError, match="timeout in the ini file: 'soon' is not a time"):
        limit(ini="timeout = soon")


def test_a_plugin_that_p_loads_counts_as_well(
    limit: Limit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    found = limit("-p", "megatron", "-p", "pytest_timeout", "--timeout=3")
    assert found == TimeLimit(3.0)


HANGS = """
    import threading

    import pytest

    def test_hangs(rank):
        if rank:
            threading.Event().wait(1000)

    @pytest.mark.timeout(method="thread")
    def test_mark_without_a_time(): pass

    @pytest.mark.timeout(0, func_only=True)
    def test_mark(): pass
"""


def test_a_default_of_pytest_timeout_does_not_undo_what_is_typed(tmp_path: Path) -> None:
    suite = Suite(tmp_path).write(test_hangs=HANGS, pytest_timeout=DECLARATIONS["2.5"])
    run = suite.run("-v", "--ranks=2", "--rank-timeout=2", "-omegatron_rank_grace=1")
    assert "rank 1 did not end in 2 s" in run.stdout
    assert run.words == {
        "test_hangs": "FAILED",
        "test_mark_without_a_time": "PASSED",
        "test_mark": "PASSED",
    }


def test_a_session_without_a_limit_is_recorded_so(tmp_path: Path) -> None:
    suite = Suite(tmp_path).write(test_one="def test_one(): pass")
    run = suite.run("--ranks=1", "--timeout=0")
    assert run.summary == "1 passed"
    (recorded,) = tmp_path.glob(".pytest_megatron/runs/2*/run.json")
    kept = json.loads(recorded.read_text())["options"]
    assert kept["rank_timeout"] == 0.0  # with which a test is reproduced

"""Tests that `--changed` runs although nothing changed for them, and what they tell."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from test_changed_session import Project

from pytest_megatron.changed.select import DrawnRun, append_drawn, draw, open_failures, read_drawn
from pytest_megatron.cli import group
from pytest_megatron.errors import ConfigError

RUN = DrawnRun(time="2026-01-01T00:00:00Z", commit="c" * 40, seed=7, num_left_out=40)
TESTS = """
import os
import pytest

@pytest.mark.parametrize("number", range(40))
def test_it(number):
    assert not os.path.exists("/proc/self/fd/0/" + str(number))
    assert "BROKEN" not in os.environ
"""


def test_what_is_drawn_takes_a_small_share_of_the_time() -> None:
    durations = {f"t{number}": 1.0 for number in range(100)}
    found = draw(durations, 3, costly=())
    assert (len(found), len(set(found))) == (5, 5)
    assert draw(durations, 3, costly=()) == found != draw(durations, 4, costly=())


def test_at_least_one_is_drawn_unless_it_costs_too_much() -> None:
    assert len(draw({"a": 5.0, "b": 5.0}, 1, costly=())) == 1
    assert draw({"a": 5.0, "w": 5.0}, 1, costly=["w"]) == ["a"]
    assert draw({"w": 5.0}, 1, costly=["w"]) == []
    assert draw({}, 1, costly=()) == []


def test_a_test_that_failed_is_open_until_it_passes(tmp_path: Path) -> None:
    path = tmp_path / "new/drawn.jsonl"
    for run in (
        DrawnRun(**{**vars(RUN), "drawn": ("a", "b"), "failed": ("a", "b")}),
        DrawnRun(**{**vars(RUN), "failed": ("a",), "passed": ("b",)}),
    ):
        append_drawn(path, run)
    assert open_failures(read_drawn(path)) == {"a"}
    runs = read_drawn(path)
    path.write_text(path.read_text() + '{"time": "2026-')  # of a session that was killed
    assert read_drawn(path) == runs
    append_drawn(path, RUN)
    assert read_drawn(path) == [*runs, RUN]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    root = tmp_path_factory.mktemp("drawn")
    (root / "test_it.py").write_text(TESTS)
    return Project.recorded(root)


@pytest.mark.parametrize("more", [(), ("-n", "2")], ids=["alone", "xdist"])
def test_a_drawn_test_that_fails_fails_the_session_and_runs_again(
    project: Project, more: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    (project.root / ".pytest_megatron/drawn.jsonl").unlink(missing_ok=True)
    done = project.pytest("--changed", "-omegatron_changed_draw=7", *more)
    said = "--changed: 2 of the 40 others run as well, drawn by -o megatron_changed_draw=7"
    assert (done.returncode, said in done.stdout) == (0, True), done.stdout
    with monkeypatch.context() as patched:  # the records know nothing of variables
        patched.setenv("BROKEN", "1")
        done = project.pytest("--changed", "-omegatron_changed_draw=7", *more)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "--changed: 2 of 2 drawn tests failed, for which nothing changed: " in done.stdout
    done = project.pytest("--changed", "-omegatron_changed_draw=off", *more)
    assert "--changed:   2: it failed when it was drawn" in done.stdout, done.stdout
    done = project.pytest("--changed", "-omegatron_changed_draw=off", *more)
    assert "--changed: 0 of 40 run" in done.stdout, done.stdout
    runs = read_drawn(project.root / ".pytest_megatron/drawn.jsonl")
    assert [(len(r.drawn), len(r.failed), len(r.passed)) for r in runs] == [
        (2, 0, 0),
        (2, 2, 0),
        (0, 0, 2),
    ]


def test_without_a_seed_each_session_draws_others(project: Project) -> None:
    found = set()
    for _ in range(2):
        lines = project.pytest("--changed", "-n", "2").stdout.splitlines()
        found |= {
            line for line in lines if "run as well, drawn by -o megatron_changed_draw=" in line
        }
    assert len(found) == 2


def test_a_seed_that_is_none_is_refused(project: Project) -> None:
    done = project.pytest("--changed", "-omegatron_changed_draw=x")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "megatron_changed_draw: 'x' is no seed, expected a number or off" in done.stderr


def test_the_audit_gives_the_rate_and_names_what_was_missed(tmp_path: Path) -> None:
    path = tmp_path / "drawn.jsonl"
    append_drawn(path, DrawnRun(**{**vars(RUN), "drawn": tuple("abcd"), "failed": ("b", "x")}))
    append_drawn(path, DrawnRun(**{**vars(RUN), "drawn": tuple("abcd")}))
    done = CliRunner().invoke(group, ["changed", "audit", str(path), str(path)])
    assert done.output == (
        "1 of 8 drawn tests failed in 2 sessions, 12.5% (95 %: 2.2% to 47.1%); nothing changed "
        "for 80 tests\n"
        "    b failed at cccccccccccc, 2026-01-01T00:00:00Z, seed 7\n"
    )


@pytest.mark.parametrize("text", ["", "{}\n", "[1]\n"])
def test_an_audit_of_nothing_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "drawn.jsonl").write_text(text)
    done = CliRunner().invoke(group, ["changed", "audit", str(tmp_path / "drawn.jsonl")])
    assert isinstance(done.exception, ConfigError)
    assert "drawn.jsonl" in str(done.exception)

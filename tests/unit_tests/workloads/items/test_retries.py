"""Attempts and repeats: what is run again, and that no attempt sees the data of another.

Megatron-LM's harness read the first attempt's data in the second, and took a golden mismatch for
a reason to try again.
"""

from __future__ import annotations

import re

import pytest
from tiny_project import Project, Run, loss_of

BACKOFF = "rank 1 of 2 raised RuntimeError: The server socket has failed to listen: EADDRINUSE"
OWN = """
[[signature]]
id = "own_service"
family = "network"
pattern = '^ValueError: the crash of rank'
transient = true
policy = "backoff"
advice = "ask its owner"
examples = ["ValueError: the crash of rank 1"]
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    project = Project(root=tmp_path_factory.mktemp("retries"))
    project.add("once", "transient@3:1")
    project.add("always", "transient@3:1", env={"TINY_TRAIN_STATE": "/nonexistent/state"})
    project.add("wrong_first", "transient@10:1", "wrong@0:1")
    project.add("silent_second", "transient@10:1", "silent@0:1")
    project.add("drift_second", "transient@10:1")
    project.add("own", "crash@3:1")
    (project.root / "own.toml").write_text(OWN)
    project.golden("drift_second", changes={4: 0.1})
    return project


@pytest.fixture(scope="module")
def run(project: Project) -> Run:
    arguments = ("--max-attempts", "2", "--junitxml", "junit.xml")
    return project.run("recipes", *arguments, "-o", "megatron_signatures=own.toml")


def test_a_transient_failure_is_run_again_and_the_workload_is_flaky(run: Run) -> None:
    assert run.verdict("once") == ("PASSED", "flaky")
    attempts = [(a["attempt"], a["signature"], a["is_transient"]) for a in run.attempts("once")]
    assert attempts == [(1, "port_in_use", True), (2, None, False)]


def test_a_signature_of_the_users_own_is_run_again(run: Run) -> None:
    attempts = [(a["attempt"], a["signature"], a["is_transient"]) for a in run.attempts("own")]
    assert attempts == [(1, "own_service", True), (2, "own_service", True)]
    assert run.verdict("own") == ("ERROR", "broken")
    assert "ask its owner" in run.problem("own")


def test_each_attempt_has_a_directory_of_its_own(run: Run) -> None:
    directories = [a["directory"] for a in run.attempts("once")]
    root = run.item_dir("once") / "repeat_1"
    assert directories == [str(root / "attempt_1"), str(root / "attempt_2")]
    first, second = (root / f"attempt_{k}" / "phase_1" for k in (1, 2))
    assert not (first / "metrics.json").exists()
    assert loss_of(first / "tensorboard").steps == (1, 2)
    assert len(loss_of(second / "metrics.json").steps) == 10


def test_a_flaky_workload_shows_in_the_summary(run: Run) -> None:
    lines = [x for x in run.stdout.splitlines() if x.startswith("flaky")]
    (line,) = [x for x in lines if x.startswith("flaky   recipes/tiny.yaml::once[dev-cpu]  ")]
    assert line.endswith(", bitwise equal, attempt 1 failed: port_in_use")


def test_infrastructure_that_fails_to_the_end_is_an_error_and_not_a_failure(run: Run) -> None:
    assert run.verdict("always") == ("ERROR", "broken")
    first, known, *rest = run.problem("always").splitlines()
    headline = re.compile(rf"{BACKOFF} at train.py:\d+ in fail_this_time, after iteration 2 of 10")
    assert headline.fullmatch(first)
    assert known.startswith("known as port_in_use (transient as a rule; not run again: it ")
    assert headline.fullmatch(rest[-1].removeprefix("attempt 1: "))


def test_wrong_data_of_an_earlier_attempt_is_never_read(run: Run) -> None:
    """In Megatron-LM a retry reads the first attempt's data."""
    assert run.verdict("wrong_first") == ("PASSED", "flaky")
    attempt = run.item_dir("wrong_first") / "repeat_1" / "attempt_1"
    first = loss_of(attempt / "phase_1" / "tensorboard").values[0]
    assert first == pytest.approx(1.0 + 5.0 - 0.1 + 1.234)


def test_right_data_of_an_earlier_attempt_does_not_help_a_later_one_without(run: Run) -> None:
    """Neither metrics nor evidence of an earlier attempt count."""
    assert run.verdict("silent_second") == ("FAILED", "failed")
    problem = run.problem("silent_second")
    assert "but wrote no metrics: " in problem
    assert "/attempt_2/phase_1\n" in problem
    assert [a["is_transient"] for a in run.attempts("silent_second")] == [True, False]


def test_a_mismatch_after_a_transient_failure_is_a_failure_and_ends_it(run: Run) -> None:
    """In Megatron-LM a golden mismatch is a reason to try again."""
    assert run.verdict("drift_second") == ("FAILED", "failed")
    assert len(run.attempts("drift_second")) == 2
    assert "lm loss, step 4: " in run.problem("drift_second")


@pytest.fixture(scope="module")
def modes(tmp_path_factory: pytest.TempPathFactory) -> Project:
    project = Project(root=tmp_path_factory.mktemp("modes"))
    project.add("sound", save_interval=5, config={"TEST_TYPE": "ckpt-resume"})
    project.row(project.case("no_golden"), write_golden=False)
    project.add("nan", "nan@3")
    project.add("silent", "silent@0")
    return project


@pytest.fixture(scope="module")
def lightweight(modes: Project) -> tuple[dict[str, str], Run]:
    """A lightweight run, and the configs as they were before it."""
    before = {case: modes.config_path(case).read_text() for case in ("sound", "nan")}
    return before, modes.run("recipes", "--lightweight", "--n-repeat", "3")


def test_a_lightweight_run_trains_four_iterations_once_and_compares_nothing(
    lightweight: tuple[dict[str, str], Run],
) -> None:
    run = lightweight[1]
    assert (run.verdict("sound"), run.verdict("no_golden")) == (("PASSED", "passed"),) * 2
    assert len(run.attempts("no_golden")) == 1
    attempt = run.item_dir("sound") / "repeat_1" / "attempt_1"
    steps = [loss_of(attempt / f"phase_{n}" / "metrics.json").steps for n in (1, 2)]
    assert steps == [(1, 2, 3, 4), (3, 4)]


def test_a_lightweight_run_still_fails_where_there_is_no_sound_loss(
    lightweight: tuple[dict[str, str], Run],
) -> None:
    run = lightweight[1]
    assert (run.verdict("nan"), run.verdict("silent")) == (("FAILED", "failed"),) * 2


def test_a_lightweight_run_leaves_the_config_and_the_next_full_run_alone(
    modes: Project, lightweight: tuple[dict[str, str], Run]
) -> None:
    """A lightweight run changes no file, and the next one compares again."""
    before, _ = lightweight
    assert {case: modes.config_path(case).read_text() for case in before} == before
    assert sorted(p.name for p in modes.config_path("nan").parent.iterdir()) == [
        "model_config.yaml"
    ]
    modes.golden("sound", changes={9: 5.0})
    run = modes.run("recipes", "-k", "sound", "--n-repeat", "2", run_dir="full")
    assert run.verdict("sound") == ("FAILED", "failed")
    assert [a["repeat"] for a in run.attempts("sound")] == [1, 2]
    lines = run.problem("sound").splitlines()
    told = [line for line in lines if line.endswith("against the golden:")]
    assert told == ["repeat 1 against the golden:", "repeat 2 against the golden:"]


def test_the_first_failure_ends_the_repeats_and_with_x_the_session_and_lf_finds_it(
    modes: Project,
) -> None:
    arguments = ("-x", "--cache-clear", "--test-case", "nan,silent", "--n-repeat", "3")
    run = modes.run("recipes", *arguments, run_dir="x")
    assert run.outcomes == {"nan": "FAILED"}
    assert [a["repeat"] for a in run.attempts("nan")] == [1]
    again = modes.run("recipes", "--lf", "--collect-only", "-q", run_dir="lf")
    assert [x for x in again.stdout.splitlines() if "::" in x] == [
        "recipes/tiny.yaml::nan[dev-cpu]"
    ]

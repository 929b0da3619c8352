"""One session of every test type, sound and broken: what is started, what a failure says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from golden_files import write_golden
from tiny_project import ITERS, Project, Run, loss_of, read_object, sound_metrics

from pytest_megatron.base.files import JsonValue
from pytest_megatron.workloads.golden.model import Provenance

HALF = ITERS // 2
CRASH = "rank 0 raised ValueError: the crash of rank 0"


def of_type(test_type: str, **more: JsonValue) -> dict[str, JsonValue]:
    return {"TEST_TYPE": test_type, **more}


def second(**arguments: JsonValue) -> dict[str, JsonValue]:
    """The arguments of a second phase."""
    own = {f"--{key.replace('_', '-')}": value for key, value in arguments.items()}
    return {"--train-iters": ITERS, "--tensorboard-dir": "${TENSORBOARD_PATH}", **own}


def freeze(project: Project, iteration: int, *, tracker: int) -> str:
    """Put a checkpoint into the project; returns its directory as a recipe names it."""
    directory = project.root / f"frozen_{tracker}"
    (directory / f"iter_{iteration:07d}").mkdir(parents=True)
    (directory / f"iter_{iteration:07d}" / "model.pt").write_text(str(iteration))
    (directory / "latest_checkpointed_iteration.txt").write_text(str(tracker))
    return directory.name


def golden_after(project: Project, case: str, iteration: int) -> None:
    """Write the golden of a run that starts after an iteration."""
    path = project.golden_path(case)
    path.parent.mkdir(parents=True)
    metrics = {name: s.after(iteration) for name, s in sound_metrics(project.root).items()}
    write_golden(path, metrics, Provenance(deterministic=True, repeats=2))


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    project = Project(root=tmp_path_factory.mktemp("types"), gpus=1)
    add_frozen(project)
    add_releases(project)
    add_scripts(project)
    add_expected(project)
    return project


def add_frozen(project: Project) -> None:
    frozen = freeze(project, HALF, tracker=HALF)
    # As recorded by a whole training: its own tracker names the end, which is not there.
    whole = freeze(project, HALF, tracker=ITERS)
    project.case("start", config=of_type("frozen-start"))
    project.row("start", checkpoint_load_path=[frozen], write_golden=False)
    golden_after(project, "start", HALF)
    resume = of_type("frozen-resume")
    project.row(project.case("thaw", config=resume, save_interval=5), checkpoint_load_path=[whole])
    project.row(project.case("unnamed", config=of_type("frozen-start")))
    project.row(project.case("no_thaw", config=resume), checkpoint_load_path=["nowhere"])
    crash = second(load="${CHECKPOINT_LOAD_PATH}", fault=["crash@7"])
    project.row(
        project.case("thaw_crash", config={**resume, "MODEL_ARGS_2": crash}),
        checkpoint_load_path=[frozen],
    )
    anew = of_type("ckpt-resume", MODEL_ARGS_2=second())
    project.row(project.case("anew", config=anew, save_interval=5))


def add_releases(project: Project) -> None:
    faults: dict[str, JsonValue] = {"release": None, "too_short": "exit0@4"}
    for case, fault in faults.items():
        config = of_type("release")
        project.row(project.case(case, config=config, exit_interval=ITERS, fault=fault))


def add_scripts(project: Project) -> None:
    before = 'mkdir "$OUTPUT_PATH/moved"\nexport OUTPUT_PATH="$OUTPUT_PATH/moved"\n'
    after = 'test "$EXIT_CODE" = 0\ngrep -rqF "iteration       10" "$LOG_DIR"\n'
    project.add("scripts", config=of_type("regular", BEFORE_SCRIPT=before, AFTER_SCRIPT=after))
    project.add("bad_before", config=of_type("regular", BEFORE_SCRIPT="echo broken >&2; exit 3"))
    project.add("bad_after", config=of_type("regular", AFTER_SCRIPT="grep absent /dev/null"))
    hidden = of_type("regular", AFTER_SCRIPT="EXIT_CODE=0\nexit 0\n")
    project.add("hidden", "crash@2", config=hidden)


def add_expected(project: Project) -> None:
    expected = of_type("regular", TEST_EVALUATION="xpass")
    named = {**expected, "EXPECTED_FAILURE": "ValueError: the crash"}
    project.row(project.case("expected", config=named, fault=["crash@2:0"]), write_golden=False)
    project.add("other_cause", "exit0@2", config=named)
    project.add("unexpected", config=expected)
    project.add("differs", config=expected)
    project.golden("differs", changes={3: 1.0})


@pytest.fixture(scope="module")
def run(project: Project) -> Run:
    return project.run("recipes")


def steps(run: Run, case: str, phase: int) -> tuple[int, ...]:
    attempt = run.item_dir(case) / "repeat_1" / "attempt_1"
    return loss_of(attempt / f"phase_{phase}" / "metrics.json").steps


def headline(run: Run, case: str) -> str:
    """The first line of a problem."""
    return run.problem(case).splitlines()[0]


@pytest.mark.parametrize("case", ["start", "thaw", "release", "scripts"])
def test_a_sound_workload_of_every_type_passes(run: Run, case: str) -> None:
    assert run.verdict(case) == ("PASSED", "passed")


def test_a_frozen_start_goes_on_from_the_checkpoint_of_its_row(run: Run) -> None:
    assert steps(run, "start", 1) == (6, 7, 8, 9, 10)


def test_a_frozen_resume_goes_on_half_way_and_leaves_the_checkpoint_alone(
    run: Run, project: Project
) -> None:
    assert (steps(run, "thaw", 1), steps(run, "thaw", 2)) == (
        tuple(range(1, ITERS + 1)),
        (6, 7, 8, 9, 10),
    )
    frozen = project.root / f"frozen_{ITERS}"
    assert sorted(path.name for path in frozen.iterdir()) == [
        "iter_0000005",
        "latest_checkpointed_iteration.txt",
    ]
    assert (frozen / "latest_checkpointed_iteration.txt").read_text() == "10"
    compared = read_object(run.item_dir("thaw") / "comparison.json")["repeats"]
    assert isinstance(compared, list)
    assert [r["against"] for r in compared if isinstance(r, dict)] == ["golden", "first phase"]


@pytest.mark.parametrize(
    ("case", "problem"),
    [
        pytest.param(
            "unnamed",
            "'unnamed' is frozen-start and the row has no checkpoint_load_path, expected the "
            "directory of the checkpoint to start from; add it to the product or to spec",
            id="not named",
        ),
        pytest.param(
            "no_thaw",
            "nowhere: there is no frozen checkpoint iter_0000005, found no checkpoint; nothing "
            "was run; to make one, train the case once as ckpt-resume and copy iter_0000005 from "
            "the attempt's checkpoints directory",
            id="frozen-resume",
        ),
    ],
)
def test_a_missing_frozen_checkpoint_is_an_error_that_says_what_to_do(
    run: Run, case: str, problem: str
) -> None:
    """Without its frozen checkpoint a frozen type never passes."""
    assert run.verdict(case) == ("ERROR", "broken")
    assert run.problem(case).endswith(problem)
    assert list(run.directory.glob(f"*{case}*/repeat_1")) == []


def test_a_crash_after_a_frozen_resume_is_a_failure(run: Run) -> None:
    """A second phase that crashes fails the workload, and says which phase."""
    assert run.verdict("thaw_crash") == ("FAILED", "failed")
    assert re.fullmatch(
        rf"{CRASH} at train.py:\d+ in do, after iteration 6 of 10, in phase 2",
        headline(run, "thaw_crash"),
    )


def test_a_second_phase_that_does_not_load_its_checkpoint_fails(run: Run) -> None:
    assert run.verdict("anew") == ("FAILED", "failed")
    assert headline(run, "anew") == (
        "it did not load its checkpoint: its first step is 1, expected it to go on after 5; set "
        "--load to ${CHECKPOINT_LOAD_PATH}, in phase 2"
    )


def test_a_release_that_does_not_get_there_is_a_failure(run: Run) -> None:
    assert run.verdict("too_short") == ("FAILED", "failed")
    assert "lm loss stops at step 3, expected it to go on to 10" in headline(run, "too_short")


def test_scripts_run_around_the_training_with_its_variables(run: Run) -> None:
    phase = run.item_dir("scripts") / "repeat_1" / "attempt_1" / "phase_1"
    assert (phase / "moved" / "meeting").is_dir()  # what was exported reached the training
    assert sorted(path.name for path in phase.glob("*_script.*")) == [
        "after_script.log",
        "after_script.sh",
        "before_script.log",
        "before_script.sh",
    ]


@pytest.mark.parametrize(
    ("case", "cause", "log"),
    [
        pytest.param(
            "bad_before",
            "BEFORE_SCRIPT ended with exit code 3 before the training",
            "before_script.log",
            id="before",
        ),
        pytest.param(
            "bad_after",
            "AFTER_SCRIPT ended with exit code 1 after a clean training",
            "after_script.log",
            id="after",
        ),
    ],
)
def test_a_script_that_fails_is_a_failure(run: Run, case: str, cause: str, log: str) -> None:
    """A script runs under bash, in a process whose exit code counts."""
    assert run.verdict(case) == ("FAILED", "failed")
    assert headline(run, case).startswith(cause)
    see = run.problem(case).splitlines()[-1].removeprefix("see ")
    assert see.endswith(f"phase_1/{log}")
    assert Path(run.directory.parent, see).exists()


def test_a_training_does_not_start_after_a_script_that_failed(run: Run) -> None:
    phase = run.item_dir("bad_before") / "repeat_1" / "attempt_1" / "phase_1"
    assert not (phase / "launcher.log").exists()
    assert run.problem("bad_before").splitlines()[1:-1] == ["    broken"]


def test_a_script_cannot_overwrite_the_exit_code_of_the_training(run: Run) -> None:
    """EXIT_CODE=0 in an AFTER_SCRIPT masks nothing."""
    assert run.verdict("hidden") == ("FAILED", "failed")
    assert headline(run, "hidden").startswith(f"{CRASH} at train.py:")
    assert headline(run, "hidden").endswith(", after iteration 1 of 10")


def test_an_expected_failure_is_xfailed_and_passes(run: Run) -> None:
    """Xpass is strict; the cause that was expected can be told."""
    assert run.verdict("expected") == ("XFAIL", "passed")
    record = run.record("expected")
    assert record["is_expected"] is True
    assert str(record["summary"]).startswith("failed as expected: ")


def test_a_mismatch_may_be_the_expected_failure(run: Run) -> None:
    """Without EXPECTED_FAILURE any failure is as expected."""
    assert run.verdict("differs") == ("XFAIL", "passed")


def test_an_unexpected_pass_is_a_failure(run: Run) -> None:
    """A case that is expected to fail does not pass in silence."""
    assert run.verdict("unexpected") == ("FAILED", "failed")
    assert headline(run, "unexpected").startswith(
        "passed, but TEST_EVALUATION is xpass, so it was expected to fail; "
    )
    assert str(run.record("unexpected")["summary"]).endswith(headline(run, "unexpected"))


def test_a_failure_for_another_cause_is_a_failure(run: Run) -> None:
    """A failure that is not the expected one fails."""
    assert run.verdict("other_cause") == ("FAILED", "failed")
    assert run.problem("other_cause").splitlines()[-1] == (
        "not the failure that was expected: 'ValueError: the crash'"
    )


def test_the_plan_says_what_each_type_does(project: Project) -> None:
    found = project.run("recipes", "--plan", "--test-case", "thaw,scripts", run_dir="plan")
    assert found.returncode == 0
    lines = [line.strip() for line in found.stdout.splitlines()]
    frozen = project.root / f"frozen_{ITERS}"
    assert f"then from iteration {HALF} in {frozen}, and" in lines
    assert "time limit: 1800 s" in lines
    assert lines.index("BEFORE_SCRIPT:") < lines.index("AFTER_SCRIPT:")
    assert '| test "$EXIT_CODE" = 0' in lines

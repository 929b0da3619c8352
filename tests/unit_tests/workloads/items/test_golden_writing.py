"""Goldens that a session writes: only from a clean run, all or none.

Megatron-LM has no gate: its tool downloads what failed, from any run, without provenance.
"""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from tiny_project import Project, Run, send, wait_until

from pytest_megatron.cli import group
from pytest_megatron.workloads.golden.store import read_golden

REASON = "the old golden was wrong at step 3"
REFRESH = ("-k", "old or new", "--golden", "refresh", "--golden-reason", REASON, "-n", "2")


def git(project: Project, *arguments: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    command = ["git", "-C", str(project.root), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def commit(project: Project) -> None:
    """Commit the project; only what pytest and the trainings leave is ignored."""
    (project.root / ".gitignore").write_text("/state/\n/run*/\n__pycache__/\n.pytest_cache/\n")
    git(project, "init", "-q")
    git(project, "add", "-A")
    git(project, "commit", "-qm", "all")


def goldens(project: Project) -> dict[str, str]:
    """Every file below golden_values and its text."""
    files = (project.root / "golden_values").rglob("*")
    return {p.relative_to(project.root).as_posix(): p.read_text() for p in files if p.is_file()}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    project = Project(root=tmp_path_factory.mktemp("goldens"))
    project.add("old")
    project.golden("old", changes={3: 0.5})
    project.row(project.case("new"), write_golden=False)
    project.add("good")
    project.add("crash", "crash@2:0")
    project.add("jitter", "jitter@1")
    project.add("flaky", "transient@2:1")
    commit(project)
    return project


@pytest.fixture(scope="module")
def refreshed(recorded: tuple[dict[str, str], Run], project: Project) -> Run:
    """A clean refresh of two goldens, under pytest-xdist and with a run directory of our own."""
    assert recorded[1].returncode == 0
    run = project.run("recipes", *REFRESH, run_dir="")
    latest = project.root / ".pytest_megatron" / "runs" / "latest"
    return Run(
        returncode=run.returncode, stdout=run.stdout, stderr=run.stderr, directory=latest.resolve()
    )


@pytest.fixture(scope="module")
def recorded(project: Project) -> tuple[dict[str, str], Run]:
    """The goldens before, and a clean record of one that is missing beside one that is there."""
    before = goldens(project)
    run = project.run("recipes", "-k", "good or new", "--golden", "record", run_dir="run-record")
    return before, run


def test_workloads_that_are_not_clean_keep_every_golden_from_being_written(
    project: Project,
) -> None:
    """In Megatron-LM the values of exactly the failed runs become goldens."""
    before = goldens(project)
    arguments = ("-k", "not old and not good", "--golden", "refresh")
    run = project.run("recipes", *arguments, run_dir="run-unclean")
    causes = {
        "crash": "rank 0 of 2 raised ValueError",
        "jitter": "[spread] the repeats differ from one another, so there is no new golden",
        "flaky": "[retry] needed another attempt, so it is no golden",
    }
    assert run.outcomes == {"new": "PASSED", **dict.fromkeys(causes, "FAILED")}
    assert {case: cause in run.problem(case) for case, cause in causes.items()} == dict.fromkeys(
        causes, True
    )
    assert "goldens: none written, since not all of this run was clean" in run.stdout
    assert goldens(project) == before
    assert " in the run directory; to look at what would change" in run.stdout
    assert "; seed the program, or set NON_DETERMINSTIC_RESULTS: 1 in" in run.problem("jitter")
    accepted = golden_command(project, "accept", "run-unclean")
    assert accepted.exit_code == 1
    refused = [x.split("[")[2].partition("]")[0] for x in accepted.stderr.splitlines()[:-1]]
    assert sorted(refused) == ["not-trained", "retry", "spread"]
    assert goldens(project) == before


def golden_command(project: Project, command: str, run_dir: str, *more: str) -> Result:
    """Run a command in this process, as a user would in the project."""
    words = ["golden", command, str(project.root / run_dir), "--root", str(project.root), *more]
    return CliRunner().invoke(group, words)


def test_a_workload_that_disagrees_leaves_a_candidate_that_may_be_accepted(
    project: Project,
) -> None:
    """In Megatron-LM a failure says only that a metric failed."""
    before = goldens(project)
    run = project.run("recipes", "--test-case", "old", "--n-repeat", "2", run_dir="run-differs")
    assert run.verdict("old") == ("FAILED", "failed")
    assert goldens(project) == before
    assert "goldens: 1 candidate in the run directory" in run.stdout
    refused = golden_command(project, "accept", "run-differs")
    assert (refused.exit_code, "[loss-better] lm loss" in refused.stderr) == (1, True)
    accepted = golden_command(project, "accept", "run-differs", "--reason", REASON)
    assert (accepted.exit_code, accepted.stderr) == (0, "")
    now = goldens(project)
    assert [path for path in now if now[path] != before.get(path)] == [
        "golden_values/gpt/old/golden_values_dev_cpu.json"
    ]
    for path, text in before.items():
        (project.root / path).write_text(text)


def test_record_writes_only_what_is_missing(
    recorded: tuple[dict[str, str], Run], project: Project
) -> None:
    before, run = recorded
    assert run.outcomes == {"good": "PASSED", "new": "PASSED"}
    new = project.golden_path("new").relative_to(project.root).as_posix()
    now = goldens(project)
    assert {path: text for path, text in now.items() if path != new} == before
    lines = run.stdout.splitlines()
    assert f"{new}: new" in lines


def test_a_clean_refresh_writes_every_golden(refreshed: Run, project: Project) -> None:
    """In Megatron-LM trainings side by side share ports and directories."""
    assert refreshed.returncode == 0
    assert refreshed.outcomes == {"old": "PASSED", "new": "PASSED"}
    assert read_golden(project.golden_path("new")).metrics["lm loss"].values[2] == pytest.approx(
        5.0 - 0.3 + 1.234
    )
    assert read_golden(project.golden_path("old")).metrics == (
        read_golden(project.golden_path("new")).metrics
    )


def test_a_new_golden_says_where_it_comes_from(refreshed: Run, project: Project) -> None:
    """Goldens of Megatron-LM have no provenance."""
    provenance = read_golden(project.golden_path("new")).provenance
    assert provenance is not None
    assert (provenance.repeats, provenance.deterministic, provenance.is_dirty) == (2, True, False)
    assert provenance.commit == git(project, "rev-parse", "HEAD")
    assert provenance.spread == {"lm loss": 0.0, "num-zeros": 0.0}
    typed = ("-rA", "-p", "megatron", "recipes", *REFRESH)
    assert provenance.command == ("pytest", *typed)
    assert (provenance.gpu, provenance.driver) == (None, None)
    assert provenance.date is not None
    assert "torch" in provenance.versions
    assert provenance.world_size == 2
    assert provenance.run == refreshed.directory.name
    assert provenance.config_hash is not None


def test_a_refresh_in_which_no_workload_ran_says_so(tmp_path: Path) -> None:
    project = Project(root=tmp_path)
    project.row(project.case("new"), write_golden=False, platforms=["dgx_a100"])
    commit(project)
    run = project.run("recipes", "--golden", "refresh")
    assert (run.returncode, " 1 skipped in " in run.stdout) == (0, True)
    assert "\ngoldens: none written, no workload ran; -rs says why\n" in run.stdout


def test_a_dirty_tree_is_refused_before_anything_runs(tmp_path: Path) -> None:
    project = Project(root=tmp_path)
    project.row(project.case("new"), write_golden=False)
    commit(project)
    (tmp_path / "notes.txt").write_text("not committed")
    run = project.run("recipes", "--golden", "record")
    assert run.outcomes == {"new": "ERROR"}
    assert (
        "--golden record: the tree has uncommitted changes (notes.txt), expected a commit that the "
        "golden can name; commit it, have git ignore what no training reads, or give --allow-dirty"
    ) in run.stdout
    assert not project.golden_path("new").exists()
    assert not run.directory.exists()


# Of a training's two ranks the first one to come runs a line of the shell, once in a session.
CHANGING = """
import subprocess
try:
    open(os.environ["ONCE"], "x").close()
except FileExistsError:
    pass
else:
    subprocess.run(os.environ["CHANGE"], shell=True, check=True)
"""


@pytest.mark.nightly
def test_a_tree_that_changes_while_it_is_measured_makes_no_golden(tmp_path: Path) -> None:
    """Hours lie between the first training and the last one; what trainings write is no change."""
    project = Project(root=tmp_path)
    for case in ("first", "last"):
        project.row(project.case(case), write_golden=False)
    program = tmp_path / "train.py"
    program.write_text(f"{program.read_text()}\nimport os\n{CHANGING}")
    commit(project)
    done = project.run(
        *("recipes", "-k", "first", "--golden", "record"),
        CHANGE="echo 1 >>out.log",
        ONCE=str(project.state("1")),
    )
    assert done.verdict("first") == ("PASSED", "passed")
    assert "\nnew in the tree, and in no commit: out.log; have git ignore" in done.stdout
    git(project, "add", "-A")
    git(project, "commit", "-qm", "golden")
    before = goldens(project)
    run = project.run(
        *("recipes", "--golden", "refresh"),
        run_dir="run-changed",
        CHANGE="echo 1 >>out.log; echo '# 2' >>train.py",
        ONCE=str(project.state("2")),
    )
    assert run.outcomes == {"first": "FAILED", "last": "ERROR"}
    changed = "the tree changed after the run had begun: out.log, train.py; "
    assert f"[dirty] {changed}leave it alone, " in run.problem("first")
    assert f"--golden refresh: {changed}nothing was run" in run.problem("last")
    accepted = golden_command(project, "accept", "run-changed", "--only", "first")
    assert (accepted.exit_code, f"[dirty] {changed}" in accepted.stderr) == (1, True)
    assert "HEAD" not in accepted.stderr
    assert goldens(project) == before
    old = git(project, "rev-parse", "--short=12", "HEAD")
    git(project, "commit", "-qam", "other")
    more = ("--only", "first", "--allow-dirty")
    accepted = golden_command(project, "accept", "run-changed", *more)
    new = git(project, "rev-parse", "--short=12", "HEAD")
    assert (accepted.exit_code, accepted.stderr) == (0, f"measured at {old}; HEAD is {new}\n")
    provenance = read_golden(project.golden_path("first")).provenance
    assert provenance is not None
    assert provenance.is_dirty is True


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path) -> None:
    project = Project(root=tmp_path)
    project.row(project.case("new"), write_golden=False)
    run = project.run("recipes", "--golden", "record", GIT_CEILING_DIRECTORIES=str(tmp_path.parent))
    assert run.outcomes == {"new": "ERROR"}
    assert "--golden record: the tree has no git commit" in run.stdout


def test_a_checkout_of_another_user_is_refused_in_gits_words(tmp_path: Path) -> None:
    project = Project(root=tmp_path)
    project.row(project.case("new"), write_golden=False)
    commit(project)
    run = project.run("recipes", "--golden", "record", GIT_TEST_ASSUME_DIFFERENT_OWNER="1")
    assert run.outcomes == {"new": "ERROR"}
    assert "--golden record: git refuses the tree, which another user owns" in run.stdout
    assert f"git config --global --add safe.directory {tmp_path}" in run.stdout


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        pytest.param(
            ("--golden", "refresh", "--n-repeat", "1"),
            "--golden refresh: needs at least 2 repeats to know their spread, --n-repeat is 1; "
            "raise or drop it",
            id="one repeat",
        ),
        pytest.param(
            ("--golden", "record", "--lightweight"),
            "--golden record: a lightweight run measures nothing to keep; drop --lightweight",
            id="lightweight",
        ),
    ],
)
def test_what_could_never_make_a_golden_is_refused(
    project: Project, arguments: tuple[str, ...], error: str
) -> None:
    run = project.run("recipes", *arguments, run_dir="run-refused")
    assert (run.returncode, run.stderr) == (4, f"ERROR: {error}\n\n")


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        pytest.param(
            "golden_values/gpt/old/golden_values_dev_cpu.json",
            "lm loss, step 3: observed 5.934, golden 6.434",
            id="the golden",
        ),
        pytest.param(
            "run/tiny-old-dev-cpu*/golden.json",
            "changed while the training ran, so what was measured is not judged",
            id="the copy that the run keeps",
        ),
    ],
)
def test_a_run_is_compared_with_the_golden_that_was_there_when_it_began(
    tmp_path: Path, changed: str, problem: str
) -> None:
    """The training puts the golden in place that it agrees with."""
    project = Project(root=tmp_path)
    project.add("old")
    sound = project.golden_path("old").read_text()
    project.golden("old", changes={3: 0.5})
    (tmp_path / "sound.json").write_text(sound)
    program = tmp_path / "train.py"
    swap = f"[p.write_text(open('sound.json').read()) for p in Path().glob({changed!r})]"
    program.write_text(f"{program.read_text()}\nassert {swap}\n")
    run = project.run("recipes")
    assert run.verdict("old") == ("FAILED", "failed")
    assert problem in run.problem("old")


def test_a_policy_that_judges_nothing_is_refused_before_anything_runs(tmp_path: Path) -> None:
    project = Project(root=tmp_path)
    project.add("old")
    (tmp_path / "none.yaml").write_text(
        "format_version: 1\ninherit: strict\nmetrics: {'*': {judged: false}}\n"
    )
    run = project.run("recipes", "--golden-policy", "none.yaml")
    assert run.outcomes == {"old": "ERROR"}
    assert "none.yaml: judged is false for lm loss, num-zeros, so nothing would be" in run.stdout
    assert not run.directory.exists()


@pytest.mark.nightly
def test_ctrl_c_writes_no_golden(tmp_path: Path) -> None:
    project = Project(root=tmp_path)
    project.row(project.case("new"), write_golden=False)
    project.add("hang", "hang@2:1")
    commit(project)
    process = project.start("recipes", "--golden", "refresh")
    wait_until(project.state("hang").with_suffix(".up").exists, "the hang")
    send(process, signal.SIGINT, to_group=True)
    output, _ = process.communicate()
    assert process.returncode == pytest.ExitCode.INTERRUPTED
    assert "goldens: none written, since not all of this run was clean" in output
    assert not project.golden_path("new").exists()
    accepted = golden_command(project, "accept", "run")
    assert accepted.exit_code == 1
    assert accepted.stderr == (
        "run did not come to its end: run again what it lacks\n"
        "refused: recipes/tiny.yaml::hang[dev-cpu]: [not-trained] the run was stopped while this "
        "was measured; run it again\n"
        "nothing was written; run these again, or name the others with --only\n"
    )
    assert golden_command(project, "accept", "run", "--only", "new").exit_code == 0


def test_a_golden_that_cannot_be_written_is_refused_before_anything_runs(tmp_path: Path) -> None:
    project = Project(root=tmp_path)
    project.row(project.case("new"), write_golden=False)
    (tmp_path / "golden_values").write_text("a file")
    commit(project)
    run = project.run("recipes", "--golden", "record")
    assert run.returncode == pytest.ExitCode.TESTS_FAILED
    assert "golden_values: cannot be written to: Not a directory; nothing was run" in run.text
    assert "goldens: none written, since not all of this run was clean" in run.stdout
    assert not list(tmp_path.glob(".pytest_megatron/**/attempt_1"))


def _of_another_case(project: Project, case: str) -> None:
    """Make a case's golden say that it was made of another case."""
    path = project.golden_path(case)
    project.golden(case)
    provenance = {"commit": "0" * 40, "config_hash": "0ther", "world_size": project.gpus}
    path.write_text(json.dumps({**json.loads(path.read_text()), "_provenance": provenance}))


def test_a_changed_case_wants_its_reason_before_anything_runs(tmp_path: Path) -> None:
    project = Project(root=tmp_path)
    project.row(project.case("old"))
    _of_another_case(project, "old")
    commit(project)
    run = project.run("recipes", "--golden", "refresh")
    assert run.outcomes == {"old": "ERROR"}
    assert (
        "[config-changed] the case asks for something else than before; "
        "nothing was run; give the reason with --golden-reason TEXT, which the golden then says"
    ) in run.stdout
    assert not run.directory.exists()
    reason = ("--golden-reason", "a new case")
    again = project.run("recipes", "--golden", "refresh", *reason, run_dir="run2")
    assert again.verdict("old") == ("PASSED", "passed")

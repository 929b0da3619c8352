"""`golden accept` and `golden diff`, as a user types them."""

from __future__ import annotations

import subprocess
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from staged_run import Staged, curve, metric_map

from pytest_megatron.cli import group
from pytest_megatron.errors import MegatronError
from pytest_megatron.workloads.golden.model import MetricMap
from pytest_megatron.workloads.golden.store import read_golden

SOUND = metric_map(curve())
BETTER: MetricMap = metric_map({s: float(v) * (0.9998 if s > 5 else 1) for s, v in curve().items()})
WORSE: MetricMap = metric_map({s: float(v) * (1.01 if s > 5 else 1) for s, v in curve().items()})


@pytest.fixture
def staged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Staged:
    """A run with a workload that gets better, a new one, and one that agreed with its golden."""
    monkeypatch.chdir(tmp_path)
    staged = Staged(root=tmp_path)
    staged.golden("better")
    staged.add("better", [BETTER, BETTER])
    staged.add("new", [SOUND, SOUND])
    staged.items["recipes/r.yaml::same[dev-cpu]"] = {"verdict": "passed", "attempts": []}
    staged.write()
    return staged


def run(*arguments: str) -> Result:
    return CliRunner().invoke(group, ["golden", *arguments])


def fails(*arguments: str) -> str:
    """Return the one line of an error that `main` prints before it ends with 2."""
    result = run(*arguments)
    assert isinstance(result.exception, MegatronError), result.output
    return str(result.exception)


def goldens(staged: Staged) -> set[str]:
    return {p.parent.name for p in (staged.root / "golden_values").rglob("*.json")}


def test_a_finished_run_is_accepted_as_a_whole(staged: Staged) -> None:
    result = run("accept", "run")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0] == "2 goldens: 1 new, 1 changed"
    assert lines[2].split() == [
        *("golden_values/gpt/better/golden_values_dev_cpu.json", "lm", "loss", "100"),
        *("0.000190", "2.0e-04", "6", "digits"),
    ]
    assert "golden_values/gpt/new/golden_values_dev_cpu.json: new" in lines
    assert "2 written" in lines
    assert read_golden(staged.root / staged.target("better")).metrics == BETTER
    assert run("accept", "run").stdout == "2 goldens: 2 unchanged\n2 written\n"


def test_a_dry_run_writes_nothing(staged: Staged) -> None:
    result = run("accept", "run", "--dry-run")
    assert result.exit_code == 0
    assert result.stdout.endswith("2 would be written (--dry-run)\n")
    assert goldens(staged) == {"better"}


def test_one_workload_may_be_named(staged: Staged) -> None:
    assert run("accept", "run", "--only", "*::new*").exit_code == 0
    assert goldens(staged) == {"better", "new"}
    assert fails("accept", "run", "--only", "none") == (
        "--only: 'none' is no workload of these runs, they have "
        "recipes/r.yaml::better[dev-cpu], recipes/r.yaml::new[dev-cpu]"
    )


def test_a_refusal_names_the_rule_and_writes_nothing(staged: Staged) -> None:
    staged.golden("worse")
    staged.add("worse", [WORSE, WORSE])
    result = run("accept", "run")
    assert result.exit_code == 1
    refused, way_out = result.stderr.splitlines()
    assert refused == (
        "refused: recipes/r.yaml::worse[dev-cpu]: [loss-worse] lm loss gets worse by 8.9e-03 in "
        "the mean, 1.0e-03 needs no reason"
    )
    assert way_out == "nothing was written; give --reason TEXT"
    assert "new" not in goldens(staged)
    taken = run("accept", "run", "--reason", "  the learning\nrate ")
    assert taken.stdout.endswith("3 written\n")
    origin = read_golden(staged.root / staged.target("worse")).provenance
    assert origin is not None
    assert origin.reason == "the learning rate"


def test_artifacts_are_accepted_like_runs(staged: Staged) -> None:
    """Two artifacts of CI, each with a run somewhere in it."""
    other = Staged(root=staged.root, name="other")
    other.add("third", [SOUND, SOUND])
    with zipfile.ZipFile("a.zip", "w") as packed:
        for path in sorted(staged.run_dir.rglob("*")):
            packed.write(path, Path("artifact") / path.relative_to(staged.root))
    with tarfile.open("b.tar.gz", "w:gz") as packed_tar:
        packed_tar.add("other")
    result = run("accept", "a.zip", "b.tar.gz")
    assert (result.exit_code, result.stderr) == (0, "")
    assert goldens(staged) == {"better", "new", "third"}


def test_two_candidates_for_one_golden_are_refused(staged: Staged) -> None:
    other = Staged(root=staged.root, name="other")
    other.add("new", [SOUND, SOUND])
    result = run("accept", "run", "other")
    assert result.exit_code == 1
    assert "golden_values/gpt/new/golden_values_dev_cpu.json is offered by run/" in result.stderr


@pytest.mark.parametrize(
    "target",
    [
        "../golden_values/gpt/new/golden_values_dev_cpu.json",
        "golden_values/../../x/golden_values_dev_cpu.json",
        "/etc/golden_values_dev_cpu.json",
        "golden_values/gpt/new/conftest.py",
        "pyproject.toml",
        None,
    ],
)
def test_an_artifact_cannot_choose_where_to_write(staged: Staged, target: str | None) -> None:
    staged.items["recipes/r.yaml::new[dev-cpu]"] |= {"golden": {"target": target}}  # type: ignore[operator]
    staged.write()
    error = fails("accept", "run")
    assert error.startswith(f"recipes/r.yaml::new[dev-cpu]: its golden is {target!r}, expected ")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "run.json: is no JSON"),
        ("[]", "run.json: holds a list, expected an object"),
        ("{}", "run.json: items: is missing; give the file as the run wrote it"),
    ],
)
def test_a_run_file_that_is_none_is_one_clear_error(
    staged: Staged, text: str, problem: str
) -> None:
    (staged.run_dir / "run.json").write_text(text)
    assert problem in fails("accept", "run")


def test_words_of_an_artifact_do_not_steer_the_terminal(staged: Staged) -> None:
    name = "recipes/r.yaml::evil\x1b[2J\x07[dev-cpu]"
    evil = staged.items.pop("recipes/r.yaml::new[dev-cpu]")
    staged.items[name] = {**evil, "problem": "\x1b[31m"}  # type: ignore[dict-item]
    staged.write()
    result = run("accept", "run")
    assert "\x1b" not in result.output
    assert "\x07" not in result.output
    assert "recipes/r.yaml::evil[dev-cpu]: [damaged-run]" in result.stderr


@pytest.mark.parametrize("directory", ["..", "/", "", None, "/x/.."])
def test_an_artifact_cannot_name_a_directory_outside_of_the_run(
    staged: Staged, directory: str | None
) -> None:
    (staged.root / "golden_candidate.json").write_text("{}")
    staged.items["recipes/r.yaml::new[dev-cpu]"] |= {"directory": directory}  # type: ignore[operator]
    staged.write()
    result = run("accept", "run", "--only", "new")
    assert result.exit_code == 1
    assert "[not-trained]" in result.stderr


def test_what_is_no_run_is_one_clear_error(staged: Staged) -> None:
    assert fails("accept", "none").startswith("none: is not there, expected a run directory")
    (staged.root / "empty").mkdir()
    assert fails("accept", "empty").startswith("empty: holds no run.json, expected")
    (staged.root / "text").write_text("x")
    assert fails("accept", "text").startswith("text: is no directory and no archive")


def test_a_tree_that_cannot_be_written_is_one_clear_error(staged: Staged) -> None:
    (staged.root / "golden_values" / "gpt" / "new").write_text("a file where a directory belongs")
    error = fails("accept", "run")
    assert error.endswith("no golden was changed; make room, or make it writable")
    assert read_golden(staged.root / staged.target("better")).metrics != BETTER


def git(*arguments: str) -> None:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    command: Sequence[str] = ["git", *identity, *arguments]
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture
def repository(staged: Staged) -> Staged:
    git("init", "-q")
    git("add", "golden_values")
    git("commit", "-qm", "old")
    assert run("accept", "run").exit_code == 0
    return staged


def test_a_commit_is_compared_with_the_working_tree_and_with_another(
    repository: Staged,
) -> None:
    """Megatron-LM's report leaves out new goldens."""
    states = {"changed": 1, "new": 1}

    def found(*arguments: str) -> dict[str, int]:
        result = run("diff", *arguments)
        assert (result.exit_code, result.stderr) == (0, "")
        counts = result.stdout.splitlines()[0].partition(": ")[2].split(", ")
        return {state: int(n) for n, state in (count.split(" ") for count in counts)}

    assert found() == states
    assert found("--rev", "HEAD") == states
    assert found("--rev", "HEAD", "golden_values/gpt/new") == {"new": 1}
    git("add", "golden_values")
    git("commit", "-qm", "new")
    assert found("--rev", "HEAD~1..HEAD") == states
    assert found("--rev", "HEAD", "--rev", "HEAD~1") == {"changed": 1, "gone": 1}
    assert found("--rev", "HEAD") == {"unchanged": 2}
    assert repository.root.is_dir()


def test_paths_limit_a_comparison_and_what_cannot_be_read_is_named(repository: Staged) -> None:
    target = repository.target("better")
    assert run("diff", target).stdout.splitlines()[0] == "1 golden: 1 changed"
    assert "1 golden: 1 changed." in run("diff", target, "--format", "markdown").stdout
    (repository.root / target).write_text("{}")
    result = run("diff", target)
    assert result.exit_code == 0
    assert result.stdout == f"1 golden: 1 unreadable\n{target}: unreadable\n"
    assert result.stderr.startswith(f"{target}: holds no metric ({{}})")
    git("add", "golden_values")
    git("commit", "-qm", "broken")  # that is no matter of the next change
    same = run("diff", target)
    assert (same.stdout, same.stderr) == ("1 golden: 1 unchanged\n", "")


@pytest.mark.usefixtures("repository")
def test_bad_revisions_are_clear_errors() -> None:
    assert fails("diff", "--rev", "nope").startswith(".: git says: fatal: Not a valid object name")
    assert fails("diff", "--rev", "--output=x").startswith(".: git says: fatal:")
    assert fails("diff", "--rev", "a..").startswith("--rev: found 2 commits, expected")

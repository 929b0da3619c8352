"""`golden accept`, `golden review` and `golden diff`, as a user types them."""

from __future__ import annotations

import json
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


def run(*arguments: str, keys: str | None = None) -> Result:
    return CliRunner().invoke(group, ["golden", *arguments], input=keys)


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
    assert "golden_values/gpt/better/golden_values_dev_cpu.json: changed" in lines
    assert "golden_values/gpt/new/golden_values_dev_cpu.json: new, 1 metric" in lines
    assert "2 written" in lines
    assert read_golden(staged.root / staged.target("better")).metrics == BETTER
    page = (staged.run_dir / "goldens.md").read_text()
    message = (staged.run_dir / "goldens_commit_message.txt").read_text()
    assert page.startswith("## Goldens\n")
    assert message.startswith("Refresh goldens of 2 cases\n")
    assert result.stdout.endswith(message)
    assert run("accept", "run").output == "nothing to accept: no workload left a candidate\n"


def test_a_dry_run_writes_nothing(staged: Staged) -> None:
    result = run("accept", "run", "--dry-run", "--format", "markdown")
    assert result.exit_code == 0
    assert result.stdout.endswith("2 would be written (--dry-run)\n")
    assert (goldens(staged), (staged.run_dir / "goldens.md").exists()) == ({"better"}, False)


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
    taken = run("accept", "run", "--reason", "  the learning\nrate ", "--format", "json")
    assert json.loads(taken.stdout)["is_written"] is True
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
    assert (staged.root / ".pytest_megatron" / "goldens.md").is_file()


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


def test_words_of_an_artifact_do_not_steer_the_terminal(
    staged: Staged, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "recipes/r.yaml::evil\x1b[2J\x07[dev-cpu]"
    evil = staged.items.pop("recipes/r.yaml::new[dev-cpu]")
    staged.items[name] = {**evil, "problem": "\x1b[31m"}  # type: ignore[dict-item]
    staged.write()
    outputs = [run("accept", "run"), run("review", "run", "--list"), review(monkeypatch, "mss")]
    assert [r for r in outputs if "\x1b" in r.output or "\x07" in r.output] == []
    assert "recipes/r.yaml::evil[dev-cpu]: [damaged-run]" in outputs[0].stderr


def test_a_directory_that_is_no_text_is_one_clear_error(staged: Staged) -> None:
    staged.items["recipes/r.yaml::new[dev-cpu]"] |= {"directory": 3}  # type: ignore[operator]
    staged.write()
    assert "directory: found 3, expected a string" in fails("accept", "run")


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


def review(monkeypatch: pytest.MonkeyPatch, keys: str, *arguments: str) -> Result:
    monkeypatch.setattr(
        "pytest_megatron.workloads.commands.golden_refresh.is_interactive", lambda: True
    )
    return run("review", "run", *arguments, keys=keys)


def test_a_review_accepts_rejects_and_skips(
    staged: Staged, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged.add("third", [SOUND, SOUND])
    result = review(monkeypatch, "ars")
    assert result.exit_code == 0, result.output
    assert goldens(staged) == {"better"}
    assert read_golden(staged.root / staged.target("better")).metrics == BETTER
    assert "1 of 3: recipes/r.yaml::better[dev-cpu]" in result.stdout
    assert "lm loss (· golden, + candidate, • both):" in result.stdout
    assert (staged.run_dir / "r-new-dev-cpu" / "golden_rejected.json").is_file()
    assert [line.split()[0] for line in run("review", "run", "--list").stdout.splitlines()] == [
        "recipes/r.yaml::third[dev-cpu]"
    ]
    assert run("accept", "run").exit_code == 0
    assert goldens(staged) == {"better", "third"}


def test_many_goldens_are_decided_by_the_way_in_which_they_change(
    staged: Staged, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(6):
        staged.golden(f"worse{number}")
        staged.add(f"worse{number}", [WORSE, WORSE])
        staged.golden(f"better{number}")
        staged.add(f"better{number}", [BETTER, BETTER])
    result = review(monkeypatch, "samorsssssa")
    assert result.exit_code == 0, result.output
    headings = [x for x in result.stdout.splitlines() if " of 14: " in x]
    assert headings[0] == "1 of 14: recipes/r.yaml::new[dev-cpu]"  # the only one of its kind
    assert headings[1].startswith("2 to 7 of 14: 6 goldens: changed; loss worse, by < 1e-1 in the")
    assert headings[1].endswith("outside the band; refused: loss-worse")
    assert [x.partition(": ")[0] for x in headings[2:8]] == [f"{n} of 14" for n in range(2, 8)]
    assert headings[8].startswith("8 to 14 of 14: 7 goldens: changed; loss better, by < 1e-3")
    assert "cannot be accepted, give --reason TEXT: [loss-worse] lm loss" in result.stdout
    assert "7 written" in result.stdout
    assert read_golden(staged.root / staged.target("better5")).metrics == BETTER
    assert read_golden(staged.root / staged.target("worse5")).metrics == SOUND


def test_quitting_a_review_decides_nothing(staged: Staged, monkeypatch: pytest.MonkeyPatch) -> None:
    result = review(monkeypatch, "rmq")
    assert result.exit_code == 0
    assert result.stdout.endswith("quit: nothing was decided, nothing was written\n")
    assert (staged.run_dir / "r-better-dev-cpu" / "golden_candidate.json").is_file()
    assert goldens(staged) == {"better"}


def test_what_the_gate_refuses_cannot_be_accepted_in_a_review(
    staged: Staged, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged.golden("bad")
    staged.add("bad", [metric_map(curve(60))] * 2)
    result = review(monkeypatch, "ax?s", "--only", "bad")
    assert "cannot be accepted, it never may: [truncated] repeat 1, lm loss ends" in result.stdout
    assert result.stdout.endswith("nothing was accepted, so nothing was written\n")


def test_a_review_begins_with_how_to_have_what_can_be_accepted(
    staged: Staged, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged.add("once", [BETTER])
    result = review(monkeypatch, "sss")
    before, _, _ = result.output.partition("1 of 3: ")
    assert "\n1 of 3 candidates cannot be accepted, they were not trained 2 times" in f"\n{before}"
    line = "    pytest -p megatron 'recipes/r.yaml::once[dev-cpu]' --n-repeat 2\n"
    assert line in before
    assert line in run("review", "run", "--list").stderr


def test_a_review_without_a_terminal_says_what_to_do(staged: Staged) -> None:
    assert fails("review", str(staged.run_dir)).startswith(
        "golden review: needs a terminal to ask on; give --accept-all or --list"
    )
    assert run("review", "run", "--accept-all").exit_code == 0
    assert goldens(staged) == {"better", "new"}
    assert "nothing waits for a decision" in run("review", "run", "--list").stdout


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
    states = {"better": "changed", "new": "new"}

    def found(*arguments: str) -> dict[str, str]:
        result = run("diff", *arguments, "--format", "json")
        assert (result.exit_code, result.stderr) == (0, "")
        return {g["path"].split("/")[2]: g["state"] for g in json.loads(result.stdout)["goldens"]}

    assert found("--rev", "HEAD") == states
    assert found("--rev", "HEAD", "golden_values/gpt/new") == {"new": "new"}
    git("add", "golden_values")
    git("commit", "-qm", "new")
    assert found("--rev", "HEAD~1..HEAD") == states
    assert found("--rev", "HEAD", "--rev", "HEAD~1") == {"better": "changed", "new": "gone"}
    assert found("--rev", "HEAD") == {"better": "unchanged", "new": "unchanged"}
    assert repository.root.is_dir()


def test_files_and_directories_are_compared(repository: Staged) -> None:
    old = str(repository.golden("old").relative_to(repository.root))
    new = repository.target("better")
    text = run("diff", old, new)
    assert text.stdout.splitlines()[0] == f"{new}: changed"
    assert run("diff", old, new, "--exit-code").exit_code == 1
    assert run("diff", old, old, "--exit-code").exit_code == 0
    page = run("diff", "golden_values/gpt/old", "golden_values/gpt/better", "--format", "markdown")
    assert "1 golden: 1 changed." in page.stdout


def test_bad_sides_of_a_difference_are_clear_errors(repository: Staged) -> None:
    target = repository.target("better")
    assert fails(
        "diff", target
    ) == "golden diff: found 1 paths, expected OLD and NEW, or --rev " + ("COMMIT")
    assert fails("diff", target, "golden_values").endswith("give two files or two directories")
    assert fails("diff", target, "none") == "none: no such file or directory"
    assert fails("diff", "--rev", "nope").startswith(".: git says: fatal: Not a valid object name")
    assert fails("diff", "--rev", "--output=x").startswith(".: git says: fatal:")
    assert fails("diff", "--rev", "a..").startswith("--rev: found 2 commits, expected")
    Path("broken.json").write_text("{}")
    result = run("diff", target, "broken.json", "--exit-code")
    assert result.exit_code == 1
    assert result.stderr.startswith("broken.json: holds no metric ({})")


def test_a_command_ends_what_a_killed_refresh_began(staged: Staged) -> None:
    """The journal says that all new files are on the disk; one of two was renamed already."""
    targets = [staged.target("better"), staged.target("new")]
    entries = [{"target": t, "has_old": n == 0} for n, t in enumerate(targets)]
    text = (staged.run_dir / "r-new-dev-cpu" / "golden_candidate.json").read_text()
    waiting = staged.root / "golden_values/gpt/new/.golden_values_dev_cpu.json.new"
    waiting.parent.mkdir()
    waiting.write_text(text)
    (staged.root / ".pytest_megatron").mkdir()
    journal = staged.root / ".pytest_megatron" / "goldens.replacing.json"
    journal.write_text(json.dumps({"schema": 1, "entries": entries, "made": []}))
    assert run("review", "run", "--list").exit_code == 0
    assert (staged.root / staged.target("new")).read_text() == text
    assert (waiting.exists(), journal.exists()) == (False, False)

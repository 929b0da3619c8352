"""What a session decided is in its run directory, and on the terminal if pytest is asked for it."""

from __future__ import annotations

from pathlib import Path

from tiny_project import Project


def test_decisions_are_kept_and_shown(tmp_path: Path) -> None:
    project = Project(root=tmp_path)
    project.add("sound")
    (tmp_path / "test_ranks.py").write_text("def test_ranks(rank): pass\n")
    result = project.run("--ranks", "2", "test_ranks.py", "recipes", "--log-cli-level=INFO")
    assert "2 passed" in result.stdout
    decided = (result.directory / "megatron.log").read_text()
    for text in (
        "pytest_megatron.gangs: ranks are forked from the session",
        "pytest_megatron.gangs: gang 1: 2 ranks on cpu, no GPU",
        "pytest_megatron.workloads: recipes/tiny.yaml::sound[dev-cpu]: golden ",
        "repeat 1, attempt 1: no further attempt: it trained as it should",
    ):
        assert text in decided, decided
    assert "sound[dev-cpu]: golden " in result.stdout


def test_a_failing_item_captures_no_decisions(tmp_path: Path) -> None:
    project = Project(root=tmp_path)
    project.add("differs")
    project.golden("differs", changes={3: 0.5})
    result = project.run("recipes")
    assert "1 failed" in result.stdout
    assert "no further attempt" not in result.stdout
    assert "no further attempt" in (result.directory / "megatron.log").read_text()

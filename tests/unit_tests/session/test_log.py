"""What a session decided is in pytest's log, if that is asked for."""

from __future__ import annotations

from pathlib import Path

from tiny_project import Project


def test_decisions_are_kept_and_shown(tmp_path: Path) -> None:
    project = Project(root=tmp_path)
    project.add("sound")
    (tmp_path / "test_ranks.py").write_text("def test_ranks(rank): pass\n")
    result = project.run(
        "--ranks", "2", "test_ranks.py", "recipes", "--log-cli-level=INFO", "--log-file=decided.log"
    )
    assert "2 passed" in result.stdout
    decided = (tmp_path / "decided.log").read_text()
    for text in (
        "ranks are forked from the session",
        "gang 1: 2 ranks on cpu, no GPU",
        "recipes/tiny.yaml::sound[dev-cpu]: golden ",
        "repeat 1, attempt 1: no further attempt: it trained as it should",
    ):
        assert text in decided, decided
    assert "sound[dev-cpu]: golden " in result.stdout

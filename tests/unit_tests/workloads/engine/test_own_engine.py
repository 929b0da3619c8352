"""The engine of another package: the one that the guide shows."""

from __future__ import annotations

import re
from pathlib import Path

from tiny_project import Project

GUIDE = Path(__file__).parents[4] / "docs" / "how-to" / "add-an-engine.md"


def test_the_engine_of_the_guide_runs_workloads_and_names_the_rank_that_failed(
    tmp_path: Path,
) -> None:
    code, entry = re.findall(r"```(?:python|toml)\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    record = tmp_path / "site" / "nice_engine-1.0.dist-info"
    record.mkdir(parents=True)
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: nice-engine\nVersion: 1.0\n")
    named = entry.splitlines()[1].replace('"', "")
    (record / "entry_points.txt").write_text(f"[pytest_megatron.engines]\n{named}\n")
    (tmp_path / "site" / "nice_engine.py").write_text(code)
    project = Project(root=tmp_path / "project")
    project.add("sound")
    project.add("crash", "crash@3:1")
    run = project.run("recipes", "--executor", "nice", PYTHONPATH=str(tmp_path / "site"))
    assert (run.verdict("sound"), run.verdict("crash")) == (
        ("PASSED", "passed"),
        ("FAILED", "failed"),
    )
    assert "rank 1 of 2 raised ValueError: the crash of rank 1" in run.problem("crash")
    assert not list((run.directory / "engine").glob("*.json"))

"""`pytest-megatron adopt`: its output, its files and its exit codes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from pytest_megatron.cli.adopt import command
from pytest_megatron.errors import AdoptError


def run(*arguments: str | Path) -> tuple[int, str, str]:
    done = CliRunner().invoke(command, list(map(str, arguments)), catch_exceptions=False)
    return done.exit_code, done.stdout, done.stderr


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "run.sh").write_text("torchrun --nproc-per-node 2 -m pytest tests\n")
    return tmp_path


def test_nothing_found_is_one_line_that_names_what_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("print()\n")
    code, out, err = run(tmp_path)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith(f"pytest-megatron: {tmp_path}: nothing found in 1 file; torchrun, ")


def test_a_dry_run_prints_the_diff_and_writes_nothing(project: Path) -> None:
    code, out, err = run(project, "--dry-run")
    assert (code, err) == (0, "")
    assert out.startswith(
        "1 pytest command that a launcher starts on each rank; type:\n"
        "  run.sh:1  torchrun x 2  pytest -p megatron --ranks 2 tests\n"
    )
    assert "+++ b/pytest.ini\n@@ -0,0 +1,2 @@\n+[pytest]\n+addopts = -p megatron\n" in out
    assert out.endswith("\nto type:\n  pytest -p megatron --ranks 2 tests\n")
    assert [path.name for path in project.iterdir()] == ["run.sh"]


def test_without_git_a_new_file_is_written_and_an_old_one_is_not(project: Path) -> None:
    assert run(project)[0] == 0
    assert (project / "pytest.ini").read_text() == "[pytest]\naddopts = -p megatron\n"
    (project / "pytest.ini").write_text("[pytest]\n")
    code, out, err = run(project)
    assert (code, out.splitlines()[-1]) == (1, "wrote 0 files")
    assert err.startswith("pytest-megatron: pytest.ini has changes that are not committed, ")
    assert (project / "pytest.ini").read_text() == "[pytest]\n"


def test_a_second_run_has_nothing_to_write(project: Path) -> None:
    run(project)
    assert run(project)[1].splitlines()[-1] == "nothing to write"


def test_json_has_every_place(project: Path) -> None:
    code, out, _ = run(project, "--format", "json")
    assert (code, json.loads(out)) == (
        0,
        {
            "num_files": 1,
            "places": [
                {
                    "file": "run.sh",
                    "line": 1,
                    "kind": "pytest",
                    "found": "torchrun x 2",
                    "instead": "pytest -p megatron --ranks 2 tests",
                    "is_command": True,
                    "notes": [],
                }
            ],
        },
    )
    assert list(project.iterdir()) == [project / "run.sh"]


def test_long_lists_are_cut_unless_all_is_asked_for(project: Path) -> None:
    text = "".join(f"torchrun --nproc-per-node {n} -m pytest tests\n" for n in range(1, 23))
    (project / "run.sh").write_text(text)
    assert run(project, "--dry-run")[1].count("  and 2 more; --all lists them\n") == 2
    assert "more" not in run(project, "--dry-run", "--all")[1].partition("---")[0]


def test_nothing_of_the_project_is_executed(project: Path) -> None:
    touch = "import pathlib\npathlib.Path('touched').touch()\nimport multiprocessing\n"
    (project / "conftest.py").write_text(touch)
    (project / "run.sh").write_text("touch touched\ntorchrun -m pytest $(touch touched)\n")
    (project / "setup.py").write_text(touch)
    run(project, "--dry-run")
    assert not list(project.rglob("touched"))


def test_proof_without_a_command_that_can_run_is_an_error(project: Path) -> None:
    (project / "run.sh").write_text("torchrun -m pytest $BUCKET\n")
    with pytest.raises(AdoptError, match=r"^--prove: no command that was found can run here; "):
        run(project, "--prove")


def test_options_of_the_proof_need_it(project: Path) -> None:
    code, _, err = run(project, "--tests", "tests")
    assert (code, "--tests and --ranks are for --prove" in err) == (2, True)


def test_a_file_that_is_committed_is_changed_in_place(project: Path) -> None:
    (project / "setup.cfg").write_text("[tool:pytest]\naddopts = -ra ; x\n")
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "all"]):
        own = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org", *words]
        subprocess.run(own, cwd=project, check=True)
    assert run(project)[0] == 0
    assert (project / "setup.cfg").read_text() == "[tool:pytest]\naddopts = -p megatron -ra ; x\n"

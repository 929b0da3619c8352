"""Workloads on an engine with a queue: items, and a run whose controller is gone."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from pathlib import Path

import pytest
from tiny_project import Project, Run, send, wait_until

pytestmark = pytest.mark.nightly

ENGINES = Path(__file__).parents[1] / "engine"
POOL = ("recipes", "--executor", "pool")
TRANSIENT = "RuntimeError: The server socket has failed to listen: EADDRINUSE"


def queued(root: Path, **scripts: str) -> Project:
    """Make a project with the engine `pool` and rows; `MARKS` in a script is a directory."""
    metadata = root / "site" / "pool-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: pool\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(
        "[pytest_megatron.engines]\npool = pool_engine:PoolEngine\n"
    )
    (root / "marks").mkdir()
    project = Project(root=root, gpus=1, path=(str(root / "site"), str(ENGINES)))
    for name, text in scripts.items():
        script = f"echo $$ >> MARKS/{name}; {text}".replace("{", "{{").replace("}", "}}")
        script = script.replace("MARKS", str(root / "marks"))
        project.row(name, script=[script], write_golden=False)
    return project


def marks(project: Project, name: str) -> int:
    """How often a row ran."""
    path = project.root / "marks" / name
    return len(path.read_text().splitlines()) if path.exists() else 0


def verdicts(run: Run) -> dict[str, object]:
    items = run.json["items"]
    assert isinstance(items, dict)
    return {
        node.split("::")[1].partition("[")[0]: item["verdict"]
        for node, item in items.items()
        if isinstance(item, dict)
    }


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    project = queued(
        tmp_path_factory.mktemp("queue"),
        good="until test -e MARKS/once && test $(wc -l < MARKS/once) = 2; do sleep 0.02; done",
        bad="echo no luck >&2; exit 3",
        once=f"test $(wc -l < MARKS/once) = 2 || {{ echo '{TRANSIENT}' >&2; exit 1; }}",
        lost="exit 0",
    )
    text = "import pytest\ndef test_plain(): pass\n"
    (project.root / "test_plain.py").write_text(text)
    conftest = """
import pytest
def pytest_collection_modifyitems(items):
    for item in items:
        if "lost" in item.nodeid:
            item.add_marker(pytest.mark.skipif(True, reason="not today"))
"""
    (project.root / "conftest.py").write_text(conftest)
    return project


@pytest.fixture(scope="module")
def run(project: Project) -> Run:
    return project.run(*POOL, "test_plain.py", "--junitxml", "junit.xml", POOL_LOG="pool.log")


def junit(path: Path) -> Mapping[str, ET.Element]:
    return {str(case.get("name")): case for case in ET.parse(path).iter("testcase")}  # noqa: S314


@pytest.mark.everyday
def test_all_workloads_are_submitted_together_before_one_is_waited_for(
    project: Project, run: Run
) -> None:
    first, *others = (project.root / "pool.log").read_text().splitlines()
    items = sorted(key.split("-")[1] for key in first.split()[1:])
    assert items == ["bad", "good", "once"]
    assert [line.split("/")[1:] for line in others] == [["repeat_1", "attempt_2"]]
    assert "megatron: engine pool, goldens: check, results in run" in run.stdout


def test_items_have_their_outcomes_and_a_skip_is_never_submitted(
    project: Project, run: Run
) -> None:
    assert run.returncode == pytest.ExitCode.TESTS_FAILED
    assert "1 failed, 3 passed, 1 skipped" in run.stdout
    assert verdicts(run) == {"bad": "failed", "good": "passed", "once": "flaky"}
    assert [marks(project, name) for name in ("good", "bad", "once", "lost")] == [1, 1, 2, 0]


def test_an_item_is_reported_when_it_ended_under_its_name_with_its_own_time(
    project: Project, run: Run
) -> None:
    assert "once[dev-cpu]: attempt 1: the script " in run.stdout
    cases = junit(project.root / "junit.xml")
    # `good` has room first and waits for what `once` does, after `bad`.
    names = [name.partition("[")[0] for name in cases]
    assert names.index("bad") < names.index("good")
    spent = run.record("good")["duration_s"]
    assert isinstance(spent, float)
    assert float(str(cases["good[dev-cpu]"].get("time"))) >= spent > 0


def test_exitfirst_cancels_what_has_not_ended(tmp_path: Path) -> None:
    fails = "until test -e MARKS/waits; do sleep 0.02; done; exit 3"
    run = queued(tmp_path, waits="sleep 600", fails=fails).run(*POOL, "-x")
    assert (run.returncode, "stopping after 1 failures" in run.stdout) == (1, True)
    assert verdicts(run) == {"fails": "failed"}


def test_ctrl_c_cancels_everything_and_reports_nothing(tmp_path: Path) -> None:
    other = queued(tmp_path, waits="sleep 600", later="exit 0")
    process = other.start(*POOL, POOL_SIZE="1", POOL_LOG="pool.log")
    wait_until(lambda: marks(other, "waits") == 1, "it runs")
    send(process, signal.SIGINT, to_group=True)
    process.communicate(timeout=60)
    assert process.returncode == pytest.ExitCode.INTERRUPTED
    last = (other.root / "pool.log").read_text().splitlines()[-1]
    assert sorted(key.split("-")[1] for key in last.split()[1:]) == ["later", "waits"]
    wait_until(lambda: other.processes() == [], "the job is gone")


# Many sessions in one process, one after the other.
SESSIONS = """
import json, sys
import pytest
for arguments in json.loads(sys.argv[1]):
    print("exit code", int(pytest.main(["-p", "megatron", *arguments])))
"""
REFUSED = [
    (["recipes", "--executor", "pool", "-n2"], "--executor pool: has a queue, which takes all"),
    (["recipes", "--executor", "moon"], "--executor: unknown engine 'moon', expected one of "),
    (["recipes", "--attach=run"], "--attach: was removed; cancel the jobs of a pytest that is"),
]


def test_what_makes_no_sense_is_a_usage_error(project: Project) -> None:
    words = [sys.executable, "-uc", SESSIONS, json.dumps([arguments for arguments, _ in REFUSED])]
    done = subprocess.run(
        words, cwd=project.root, env=project.env(), capture_output=True, text=True, check=False
    )
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
    assert done.stdout.splitlines().count("exit code 4") == len(REFUSED)
    for (_, error), found in zip(REFUSED, errors, strict=True):
        assert error in found

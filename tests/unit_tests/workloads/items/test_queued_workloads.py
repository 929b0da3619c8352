"""Workloads on an engine with a queue: items, and a run whose controller is gone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import yaml
from forked_sessions import fork_session
from tiny_project import wait_until

pytestmark = pytest.mark.nightly

ENGINES = Path(__file__).parents[1] / "engine"
MARK = "QUEUE_PROJECT"  # in the environment of every process of a project
TRANSIENT = "RuntimeError: The server socket has failed to listen: EADDRINUSE"


@dataclass(frozen=True, kw_only=True)
class QueueProject:
    """A folder with rows that are scripts, and the engine `pool`."""

    root: Path

    def __post_init__(self) -> None:
        (self.root / "recipes").mkdir(parents=True)
        metadata = self.root / "site" / "pool-1.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: pool\nVersion: 1\n")
        (metadata / "entry_points.txt").write_text(
            "[pytest_megatron.engines]\npool = pool_engine:PoolEngine\n"
        )

    def rows(self, **scripts: str) -> None:
        """Write a row for each; `MARKS` in a script is the directory of marks."""
        (self.root / "marks").mkdir(exist_ok=True)
        products: list[object] = [
            {
                "test_case": [name],
                "products": [
                    {
                        "environment": ["dev"],
                        "scope": ["L0"],
                        "script": [
                            f"echo $$ >> MARKS/{name}; {text}".replace("{", "{{")
                            .replace("}", "}}")
                            .replace("MARKS", str(self.root / "marks"))
                        ],
                    }
                ],
            }
            for name, text in scripts.items()
        ]
        spec = {"model": "gpt", "gpus": 1, "platforms": "cpu"}
        recipe = {"type": "basic", "format_version": 1, "spec": spec, "products": products}
        (self.root / "recipes" / "tiny.yaml").write_text(yaml.safe_dump(recipe))

    def start(self, *arguments: str, **env: str) -> subprocess.Popen[str]:
        return self._start(sys.executable, "-m", "pytest", "-p", "megatron", *arguments, **env)

    def _start(self, *command: str, **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command,
            cwd=self.root,
            env=self.env(**env),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            process_group=0,
        )

    def env(self, **more: str) -> dict[str, str]:
        path = os.pathsep.join((str(self.root / "site"), str(ENGINES)))
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "COV_"))}
        return kept | {"PYTHONPATH": path, MARK: str(self.root), "COLUMNS": "300"} | more

    def run(self, *arguments: str, **env: str) -> tuple[int, str]:
        done = fork_session(["-p", "megatron", *arguments], self.root, self.env(**env))
        return done.returncode, done.stdout + done.stderr

    def run_program(self, program: str, argument: str) -> str:
        return self._start(sys.executable, "-uc", program, argument).communicate(timeout=120)[0]

    def marks(self, name: str) -> int:
        """How often a row ran."""
        path = self.root / "marks" / name
        return len(path.read_text().splitlines()) if path.exists() else 0

    def verdicts(self, run: str) -> dict[str, str]:
        found = json.loads((self.root / run / "run.json").read_text())
        return {name.split("::")[1]: item["verdict"] for name, item in found["items"].items()}

    def is_quiet(self) -> bool:
        """Whether nothing of it runs any more."""
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == str(self.root):
                    return False
            except psutil.Error:
                continue
        return True


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> QueueProject:
    project = QueueProject(root=tmp_path_factory.mktemp("queue"))
    project.rows(
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
def run(project: QueueProject) -> tuple[int, str]:
    arguments = ("--executor", "pool", "recipes", "test_plain.py", "--run-dir", "run", "-rA")
    return project.run(*arguments, "--junitxml", "junit.xml", POOL_LOG="pool.log")


def junit(path: Path) -> Mapping[str, ET.Element]:
    return {str(case.get("name")): case for case in ET.parse(path).iter("testcase")}  # noqa: S314


@pytest.mark.everyday
def test_all_workloads_are_submitted_together_before_one_is_waited_for(
    project: QueueProject, run: tuple[int, str]
) -> None:
    first, *others = (project.root / "pool.log").read_text().splitlines()
    items = sorted(key.split("-")[1] for key in first.split()[1:])
    assert items == ["bad", "good", "once"]
    assert [line.split("/")[1:] for line in others] == [["repeat_1", "attempt_2"]]
    assert "megatron: engine pool, goldens: check, results in run" in run[1]


def test_items_have_their_outcomes_and_a_skip_is_never_submitted(
    project: QueueProject, run: tuple[int, str]
) -> None:
    assert run[0] == pytest.ExitCode.TESTS_FAILED
    assert "1 failed, 3 passed, 1 skipped" in run[1]
    assert project.verdicts("run") == {
        "bad[dev-cpu]": "failed",
        "good[dev-cpu]": "passed",
        "once[dev-cpu]": "flaky",
    }
    assert [project.marks(name) for name in ("good", "bad", "once", "lost")] == [1, 1, 2, 0]


def test_an_item_is_reported_when_it_ended_under_its_name_with_its_own_time(
    project: QueueProject, run: tuple[int, str]
) -> None:
    assert "once[dev-cpu]: attempt 1: the script " in run[1]
    cases = junit(project.root / "junit.xml")
    # `good` has room first and waits for what `once` does, after `bad`.
    names = [name.partition("[")[0] for name in cases]
    assert names.index("bad") < names.index("good")
    record = json.loads((project.root / "run" / "run.json").read_text())["items"]
    spent = record["recipes/tiny.yaml::good[dev-cpu]"]["duration_s"]
    assert float(str(cases["good[dev-cpu]"].get("time"))) >= spent > 0


def test_exitfirst_cancels_what_has_not_ended(project: QueueProject) -> None:
    other = QueueProject(root=project.root / "exitfirst")
    other.rows(waits="sleep 600", fails="until test -e MARKS/waits; do sleep 0.02; done; exit 3")
    code, text = other.run("--executor", "pool", "recipes", "--run-dir", "run", "-x")
    assert (code, "stopping after 1 failures" in text) == (1, True)
    wait_until(other.is_quiet, "the other job is gone")
    assert other.verdicts("run") == {"fails[dev-cpu]": "failed"}


def test_ctrl_c_cancels_everything_and_reports_nothing(project: QueueProject) -> None:
    other = QueueProject(root=project.root / "interrupt")
    other.rows(waits="sleep 600", later="exit 0")
    arguments = ("--executor", "pool", "recipes", "--run-dir", "run")
    process = other.start(*arguments, POOL_SIZE="1", POOL_LOG="pool.log")
    wait_until(lambda: other.marks("waits") == 1, "it runs")
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == pytest.ExitCode.INTERRUPTED
    last = (other.root / "pool.log").read_text().splitlines()[-1]
    assert sorted(key.split("-")[1] for key in last.split()[1:]) == ["later", "waits"]
    wait_until(other.is_quiet, "the job is gone")


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


def test_what_makes_no_sense_is_a_usage_error(project: QueueProject) -> None:
    text = project.run_program(SESSIONS, json.dumps([arguments for arguments, _ in REFUSED]))
    *said, _ = text.split("exit code 4\n")
    assert len(said) == len(REFUSED), text
    for (_, error), found in zip(REFUSED, said, strict=True):
        assert error in found

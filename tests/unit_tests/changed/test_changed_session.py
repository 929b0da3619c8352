from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from forked_sessions import run_session
from test_changed_select import commit_all

from pytest_megatron.base.project import run_git
from pytest_megatron.changed.record import ProjectState, TestRecord, read_record
from pytest_megatron.changed.select import Changes
from pytest_megatron.changed.sources import Sources, files_of

FILES = {
    ".gitignore": ".pytest_*\n__pycache__\n",
    "pyproject.toml": '[tool.pytest.ini_options]\npythonpath = ["."]\n',
    "pkg/__init__.py": "",
    "pkg/a.py": """
import functools

from pkg.b import decorated

def one():
    return 1

def two():
    return 2

@decorated
def three():
    return 3

@functools.cache
def table():
    with open("table.txt") as file:
        return one() + int(file.read())

def shared():
    return 6

def fifth():
    return 5
""",
    "pkg/b.py": """
def decorated(function):
    return function

def read():
    with open("data.txt") as file:
        return file.read()
""",
    "pkg/twin_a.py": "def twin():\n    return 7\n",
    "pkg/twin_b.py": "def twin():\n    return 7\n",
    "pkg/later.py": """
def in_thread():
    return 8

def numbers():
    yield 9
    yield 10

async def wait():
    return 11

NUMBERS = numbers()
""",
    "pkg/program.py": "from pkg.a import two\n\nprint(two())\n",
    "data.txt": "text\n",
    "table.txt": "4",
    "tests/test_gang.py": """
import pytest

from pkg import a

@pytest.mark.world_size(2)
def test_of_one_rank(rank):
    assert rank == 0 or a.two() == 2

@pytest.mark.world_size(2)
def test_of_no_code(rank):
    pass
""",
    "tests/test_plain.py": """
import asyncio
import functools
import os
import subprocess
import sys
import threading

import pytest

from pkg import a, b, later, twin_a, twin_b

@pytest.fixture(scope="module")
def six():
    return a.shared()

def test_one():
    assert a.one() == 1

def test_first_shared(six):
    assert six == 6

def test_second_shared(six):
    assert six == 6

def test_first_table():
    assert a.table() == 5

def test_second_table():
    assert a.table() == 5

@functools.cache
def own_table():
    return a.fifth()

def test_first_own_table():
    assert own_table() == 5

def test_second_own_table():
    assert own_table() == 5

def test_twins():
    assert twin_a.twin() == twin_b.twin()

def test_thread():
    thread = threading.Thread(target=later.in_thread)
    thread.start()
    thread.join()

def test_first_number():
    assert next(later.NUMBERS) == 9

def test_second_number():
    assert next(later.NUMBERS) == 10

def test_coroutine():
    assert asyncio.run(later.wait()) == 11

def test_data():
    assert b.read() == "text\\n"

def test_program():
    assert subprocess.check_output([sys.executable, "-m", "pkg.program"]) == b"2\\n"

def test_hidden_program():
    subprocess.check_call([sys.executable, "-c", ""], env={"PATH": os.environ["PATH"]})
""",
}
GANG, PLAIN = "tests/test_gang.py", "tests/test_plain.py"


class Project:
    def __init__(self, root: Path) -> None:
        self.root = root
        for name, text in FILES.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        assert run_git(root, "init", "-q").returncode == 0

    @classmethod
    def recorded(cls, root: Path) -> Project:
        """Return a directory as a project all of whose tests ran and were recorded."""
        assert run_git(root, "init", "-q").returncode == 0
        found = cls.__new__(cls)
        found.root = root
        done = found.pytest("--record-changed")
        assert done.returncode == 0, done.stdout + done.stderr
        return found

    def pytest(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.pytest_in(self.root, *arguments)

    @staticmethod
    def pytest_in(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        names = ("PYTEST_", "COV_", "COVERAGE_")
        env = {name: value for name, value in os.environ.items() if not name.startswith(names)}
        return run_session(["-q", "-p", "megatron", *arguments], root, env)

    def selected(self) -> set[str]:
        """Return the tests for which something changed since they were recorded."""
        record = self.record
        now = ProjectState(environment=record.states[0].environment, files=files_of(self.root))
        changes = Changes(record, Sources(self.root), now)
        return {n.split("::")[1] for n in record.tests if changes.reason(n, None) is not None}

    def selected_with(self, path: str, old: str, new: str) -> set[str]:
        text = (self.root / path).read_text()
        assert old in text
        (self.root / path).write_text(text.replace(old, new, 1))
        try:
            return self.selected() - {HIDDEN}
        finally:
            (self.root / path).write_text(text)

    @property
    def record(self) -> TestRecord:
        return read_record(self.root / ".pytest_megatron/changed.z")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    found = Project(tmp_path_factory.mktemp("project"))
    done = found.pytest("--record-changed")
    assert done.returncode == 0, done.stdout + done.stderr
    return found


HIDDEN = "test_hidden_program"  # always runs: nothing records its process


def test_tests_run_whose_code_changed_in_any_process(project: Project) -> None:
    """Code of rank 1 alone, of a program, of a fixture and of a cache's first caller counts."""
    assert project.selected() == {HIDDEN}
    programs = {"test_program"}
    tables = {"test_first_table", "test_second_table"}
    for function, value, expected in (
        ("one", "1", {"test_one"} | tables),
        ("two", "2", {"test_of_one_rank"} | programs),
        ("three", "3", set()),
        ("shared", "6", {"test_first_shared", "test_second_shared"}),
        ("fifth", "5", {"test_first_own_table", "test_second_own_table"}),
    ):
        found = project.selected_with("pkg/a.py", f"return {value}", f"return {value}0")
        # Of a program of a test, Python 3.11 gives the files.
        is_by_function = sys.version_info >= (3, 12) or function == "two"
        assert found == expected | (set() if is_by_function else programs), function
    assert project.selected_with("data.txt", "text", "other") == {"test_data"}
    assert project.selected_with("table.txt", "4", "5") == tables


def test_functions_count_that_others_equal_or_that_run_later(project: Project) -> None:
    numbers = {"test_first_number", "test_second_number"}
    for path, line, expected in (
        ("pkg/twin_a.py", "return 7", {"test_twins"}),
        ("pkg/twin_b.py", "return 7", {"test_twins"}),
        ("pkg/later.py", "return 8", {"test_thread"}),
        ("pkg/later.py", "yield 10", numbers),
        ("pkg/later.py", "return 11", {"test_coroutine"}),
    ):
        assert project.selected_with(path, line, f"{line}0") == expected, (path, line)


def test_what_runs_on_import_counts_for_all_that_import(project: Project) -> None:
    found = project.selected_with("pkg/b.py", "return function", "return print or function")
    assert found >= {"test_of_no_code", "test_one", "test_second_shared", "test_program"}


def test_entries_say_how_tests_ran(project: Project) -> None:
    tests = project.record.tests
    assert tests[f"{GANG}::test_of_one_rank"].mode == "cpu x2"
    assert tests[f"{PLAIN}::test_one"].mode == "plain"
    problem = "it starts a process with other environment variables"
    assert tests[f"{PLAIN}::{HIDDEN}"].problem == problem
    assert project.record.collected == {GANG: 2, PLAIN: 15}


def test_a_session_without_changes_succeeds_and_keeps_the_record(project: Project) -> None:
    before = project.record
    done = project.pytest("--changed", "--record-changed", GANG)
    assert (done.returncode, "--changed: 0 of 2 run" in done.stdout) == (0, True)
    assert project.record.tests.keys() == before.tests.keys()


def test_what_a_run_writes_into_a_project_is_no_change(tmp_path: Path) -> None:
    """Without a .gitignore, with the record at its place and at another one in the project."""
    (tmp_path / "test_one.py").write_text("def test_one():\n    pass\n")
    assert run_git(tmp_path, "init", "-q").returncode == 0
    for option in ((), ("-omegatron_changed_file=jobs/one.z",)):
        for _ in range(2):  # the second one finds the record of the first
            recorded = Project.pytest_in(tmp_path, "--record-changed", *option)
            assert recorded.returncode == 0, recorded.stdout + recorded.stderr
        done = Project.pytest_in(tmp_path, "--changed", *option)
        assert "--changed: 0 of 1 run" in done.stdout, done.stdout
    listed = run_git(tmp_path, "status", "--short", "--untracked-files=all").stdout
    assert b".pytest_megatron" not in listed


def test_nothing_of_the_recorder_is_imported_without_the_option(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text("""
import sys

def test_plain():
    assert "pytest_megatron.changed.watch" not in sys.modules

def test_gang(rank):
    assert "pytest_megatron.changed.watch" not in sys.modules
""")
    done = Project.pytest_in(tmp_path, "-p", "megatron", "--ranks=2")
    assert done.returncode == 0, done.stdout


def test_a_base_that_is_none_ends_the_session(project: Project) -> None:
    done = project.pytest("--changed=no-branch", GANG)
    assert done.returncode == 4
    assert "git does not know it here, expected a branch, a tag or a commit" in done.stderr


@pytest.mark.parametrize("path", [GANG, f"{GANG}::test_of_no_code"])
def test_a_path_behind_the_option_is_no_base(project: Project, path: str) -> None:
    done = project.pytest("--changed", path)
    num_tests = 1 if "::" in path else 2
    assert done.returncode == 0, done.stderr
    assert f"--changed: 0 of {num_tests} run" in done.stdout


def test_without_a_record_all_tests_run(project: Project) -> None:
    done = project.pytest("--changed", "-omegatron_changed_file=elsewhere.z", f"{PLAIN}::test_one")
    assert (done.returncode, "--changed: 1 of 1 run" in done.stdout) == (0, True)


def test_what_a_plugin_starts_in_a_worker_counts_for_no_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As pytest-benchmark asks git for its tag, when workers add their options."""
    plugins, project = tmp_path / "plugins", tmp_path / "project"
    for file, text in {
        plugins / "starter.py": """
import subprocess

def pytest_addoption(parser):
    subprocess.check_output(["git", "status"])
""",
        project / "pyproject.toml": "[tool.pytest.ini_options]\naddopts = '-p starter'\n",
        project / "test_one.py": "def test_one():\n    pass\n",
    }.items():
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(plugins))
    assert run_git(project, "init", "-q").returncode == 0
    recorded = Project.pytest_in(project, "--record-changed", "-n", "2")
    assert recorded.returncode == 0, recorded.stdout + recorded.stderr
    done = Project.pytest_in(project, "--changed")
    assert "--changed: 0 of 1 run" in done.stdout, done.stdout


@pytest.mark.parametrize(
    ("method", "problem"),
    [("spawn", ""), ("fork", "it forks a process, which is not recorded")],
)
def test_a_pool_of_the_whole_session_counts_for_all_tests(
    tmp_path: Path, method: str, problem: str
) -> None:
    """As the `conftest.py` of torchmetrics has one, in which its distributed tests run."""
    for name, text in {
        "pyproject.toml": '[tool.pytest.ini_options]\npythonpath = ["."]\n',
        "pooled.py": "def four(_):\n    return 4\n",
        "conftest.py": f"""
import multiprocessing
import os
import pytest

def pytest_sessionstart(session):
    if not os.environ.get("PYTEST_XDIST_WORKER"):
        pytest.pool = multiprocessing.get_context("{method}").Pool(1)

def pytest_sessionfinish():
    if hasattr(pytest, "pool"):
        pytest.pool.terminate()
        pytest.pool.join()
""",
        "test_pool.py": """
import pytest
import pooled

def test_pool():
    assert pytest.pool.map(pooled.four, [0]) == [4]
""",
        "test_plain.py": "def test_plain():\n    pass\n",
    }.items():
        (tmp_path / name).write_text(text)
    assert run_git(tmp_path, "init", "-q").returncode == 0
    done = Project.pytest_in(tmp_path, "--record-changed")
    assert done.returncode == 0, done.stdout + done.stderr
    path = tmp_path / "pooled.py"
    path.write_text(path.read_text().replace("4", "5"))
    record = read_record(tmp_path / ".pytest_megatron/changed.z")
    now = ProjectState(environment=record.states[0].environment, files=files_of(tmp_path))
    changes = Changes(record, Sources(tmp_path), now)
    expected = problem or "pooled.py::four changed"
    if sys.version_info < (3, 12) and not problem:
        expected = "pooled.py changed"  # its files, as of any program
    reasons = {node_id: changes.reason(node_id, None) for node_id in record.tests}
    assert reasons == {"test_pool.py::test_pool": expected, "test_plain.py::test_plain": expected}


OUTER = {
    ".gitignore": ".pytest_*\n__pycache__\n",
    "conftest.py": "",
    "tests/conftest.py": """
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
""",
    "pkg/a.py": "def one():\n    return 1\n",
    "pkg/text.txt": "text",
    "tests/pytest.ini": "[pytest]\n",
    "tests/test_it.py": """
from pathlib import Path

from pkg import a

def test_one():
    assert a.one() == 1

def test_text():
    assert Path(a.__file__).with_name("text.txt").read_text() == "text"
""",
}


@pytest.fixture(scope="module")
def outer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose root directory, for pytest, is a folder of the checkout."""
    root = tmp_path_factory.mktemp("outer")
    for name, text in OUTER.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)
    commit_all(root)
    done = Project.pytest_in(root / "tests", "--record-changed")
    assert done.returncode == 0, done.stdout + done.stderr
    return root


@pytest.mark.parametrize(
    ("path", "text", "num_selected"),
    [
        pytest.param("pkg/a.py", "def one():\n    return 2\n", 1, id="function"),
        pytest.param("pkg/a.py", "X = 1\n" + OUTER["pkg/a.py"], 2, id="module"),
        pytest.param("pkg/text.txt", "other", 1, id="data"),
        pytest.param("pkg/kernel.cu", "", 2, id="of-unknown-use"),
        pytest.param("notes.md", "", 0, id="docs"),
    ],
)
@pytest.mark.parametrize("base", ["--changed", "--changed=HEAD"])
def test_code_outside_of_the_root_directory_counts(
    outer: Path, path: str, text: str, num_selected: int, base: str
) -> None:
    (outer / path).write_text(text)
    try:
        done = Project.pytest_in(outer / "tests", base)
    finally:
        assert run_git(outer, "checkout", "-q", ".").returncode == 0
        assert run_git(outer, "clean", "-qfd").returncode == 0
    assert f"--changed: {num_selected} of 2 run" in done.stdout, done.stdout + done.stderr


def test_a_record_of_another_root_directory_selects_all(outer: Path) -> None:
    done = Project.pytest_in(
        outer, "--changed", "-omegatron_changed_file=tests/.pytest_megatron/changed.z"
    )
    assert "--changed: 2 of 2 run" in done.stdout, done.stdout + done.stderr


def test_a_checkout_behind_a_link_is_recorded(outer: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(outer)
    (tmp_path / "tests").symlink_to(outer / "tests")
    place = str(tmp_path / "link/tests")
    done = Project.pytest_in(tmp_path, "--record-changed", "-omegatron_changed_file=x.z", place)
    assert done.returncode == 0, done.stdout + done.stderr
    (outer / "pkg/a.py").write_text("def one():\n    return 2\n")
    try:
        done = Project.pytest_in(tmp_path, "--changed", "-omegatron_changed_file=x.z", place)
    finally:
        assert run_git(outer, "checkout", "-q", ".").returncode == 0
    assert "--changed: 1 of 2 run" in done.stdout, done.stdout + done.stderr
    place = str(tmp_path / "tests")
    done = Project.pytest_in(tmp_path, "--record-changed", place)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert f"{place} is a link to {outer}/tests; start pytest there" in done.stderr


def test_a_copy_of_the_package_counts_by_its_files(tmp_path: Path) -> None:
    """As `pip install .` makes one, whose version says nothing about its code."""
    place = tmp_path / "lib"
    details = place / "copied-1.0.dist-info"
    details.mkdir(parents=True)
    (details / "METADATA").write_text("Metadata-Version: 2.1\nName: copied\nVersion: 1.0\n")
    (details / "direct_url.json").write_text(f'{{"url": "file://{tmp_path}", "dir_info": {{}}}}')
    found: list[str] = []
    for value in ("a", "b", "b"):
        (details / "RECORD").write_text(f"copied.py,sha256={value},1\n../../bin/x,sha256={found}\n")
        code = "import sys; from pathlib import Path\n"
        code += "from pytest_megatron.changed.sources import environment\n"
        code += "print(environment(Path(sys.argv[1]))['copied'])"
        env = {**os.environ, "PYTHONPATH": str(place)}
        command = [sys.executable, "-c", code, str(tmp_path)]
        found.append(subprocess.check_output(command, env=env, text=True))
    assert found[0] != found[1] == found[2]


@pytest.mark.parametrize("has_git", [True, False], ids=["checkout", "folder"])
def test_code_of_another_folder_on_the_path_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, has_git: bool
) -> None:
    """As a checkout of Megatron-LM beside the project, which no record of this one has."""
    project, other = tmp_path / "project", tmp_path / "other"
    project.mkdir()
    other.mkdir()
    (project / "test_one.py").write_text("import elsewhere\n\ndef test_one():\n    pass\n")
    (other / "elsewhere.py").write_text("VALUE = 1\n")
    for root in (project, other) if has_git else (project,):
        assert run_git(root, "init", "-q").returncode == 0
    path = os.pathsep.join([str(other), *filter(None, [os.environ.get("PYTHONPATH")])])
    monkeypatch.setenv("PYTHONPATH", path)
    assert Project.pytest_in(project, "--record-changed").returncode == 0
    assert "--changed: 0 of 1 run" in Project.pytest_in(project, "--changed").stdout
    (other / "elsewhere.py").write_text("VALUE = 22\n")
    done = Project.pytest_in(project, "--changed")
    assert f"the environment changed: code in {other}" in done.stdout, done.stdout

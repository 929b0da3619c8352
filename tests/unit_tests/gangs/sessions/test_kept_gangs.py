"""Sessions in a kept process are those of a new one, and nothing of it stays that nobody lists.

A module in the place of torch makes that cheap; the how-to page has a session with the real one.
"""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from gang_suite import wait_until
from kept_project import TORCH, WARM, Project

from pytest_megatron.gangs.start import kept

FACTS = """
    import json, locale, os, pathlib, resource, signal, sys

    import torch
    import helper

    def describe():
        mask, umask = signal.pthread_sigmask(signal.SIG_BLOCK, ()), os.umask(0)
        os.umask(umask)
        return {
            "env": {k: v for k, v in os.environ.items() if k not in ("MASTER_PORT", "TMPDIR")},
            "directory": os.getcwd(),
            "umask": umask,
            "files": resource.getrlimit(resource.RLIMIT_NOFILE),
            "mask": sorted(mask),
            "signals": [str(signal.getsignal(n)).partition(" at 0x")[0] for n in (1, 2, 3, 15)],
            "argv": [a for a in sys.argv if "keep-gangs" not in a],
            "orig": [a for a in sys.orig_argv if "keep-gangs" not in a],
            "path": sys.path,
            "locale": locale.setlocale(locale.LC_CTYPE),
            "streams": [sys.stdout.encoding, sys.stdout.errors, sys.stdin.encoding],
            "main": sys.modules["__main__"].__name__,
            "helper": helper.VALUE,
            "descriptors": [os.path.exists(f"/proc/self/fd/{n}") for n in (63, 77)],
        }

    HERE = describe()

    def test_facts():
        rank = os.environ["RANK"]
        facts = json.dumps({"rank": describe(), "controller": HERE})
        pathlib.Path(os.environ["FACTS"], rank).write_text(facts)
"""
LEAVES = """
    import atexit
    import os

    os.environ["OF_CONFTEST"] = "1"
    left = open(f"{os.environ['FACTS']}/../left", "w")
    atexit.register(left.write, "at the exit")
"""
LOADING = """
    import pathlib, signal, sys

    if sys.argv[0] == "-c":  # not in pytest
        pathlib.Path(__file__).parent.with_name("loading").touch()
        signal.pause()
"""
BESIDE = """
    import pathlib

    with pathlib.Path("imports").open("a") as file:
        file.write("x")

    def pytest_addoption(parser):
        parser.addoption("--beside", type=int)

    def pytest_report_header(config):
        return f"beside: {config.option.beside}"
"""


# As python_files/vscode_pytest/run_pytest_script.py of vscode-python has it: ids in a file that is
# read once, its own folders in sys.path, a changed PATH, and results by a plugin of its own.
RUNNER = """
    import os
    import pathlib
    import sys

    import pytest

    os.environ["PATH"] = "/scripts" + os.pathsep + os.environ["PATH"]
    sys.path.append(os.fspath(pathlib.Path(__file__).parent))

    if __name__ == "__main__":
        sys.path.append(os.fspath(pathlib.Path(__file__).parent.parent))
        sys.path.insert(0, os.getcwd())
        ids = pathlib.Path(os.environ["IDS"])
        tests = ids.read_text().splitlines()
        ids.unlink()
        pytest.main(["-p", "vscode_pytest", *sys.argv[1:], *tests])
        print("the runner goes on, and PATH begins with", os.environ["PATH"].split(os.pathsep)[0])
"""
RUNNER_PLUGIN = """
    import os

    known = set()

    def note(line):
        if line not in known:
            known.add(line)
            with open(os.environ["RESULTS"], "a") as file:
                file.write(f"{line}\\n")

    def pytest_report_teststatus(report):
        if report.when == "call":
            note(f"{report.nodeid} {report.outcome}")

    def pytest_sessionfinish(exitstatus):
        note(f"end {int(exitstatus)}")
"""
RUNNER_TESTS = """
    import os
    import sys

    import torch
    import helper

    def test_good():
        assert os.environ["PATH"].startswith("/scripts")
        assert sys.path[0] == os.getcwd()
        assert [p for p in sys.path if p.endswith("/vscode_pytest")]

    def test_bad():
        assert helper.VALUE == 2
"""


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    """A project whose first session has kept a process."""
    made = Project(tmp_path)
    made.write("pytest.ini", "[pytest]")
    made.write("stub/torch.py", TORCH)
    made.write("helper.py", "VALUE = 1")
    made.write("test_facts.py", FACTS)
    made.write("facts/.keep", "")
    made.write("elsewhere/.keep", "")
    yield made
    made.end()


def first(project: Project, *args: str) -> kept.KeptProcess:
    code, output = project.run("test_facts.py", *args, FACTS="facts")
    assert (code, "none was kept yet" in output) == (0, True), output
    return project.kept()


def facts(project: Project) -> dict[str, dict[str, dict[str, str]]]:
    found = [json.loads((project.root / "facts" / str(rank)).read_text()) for rank in range(2)]
    return {f"{who} {rank}": found[rank][who] for rank in range(2) for who in found[rank]}


def test_ranks_of_a_kept_process_are_those_of_a_new_one(project: Project) -> None:
    process = first(project)
    project.write("helper.py", "VALUE = 22")
    project.write("conftest.py", LEAVES)
    where = {"directory": "elsewhere", "FACTS": str(project.root / "facts"), "SET": "now"}
    args = ["../test_facts.py", "-rA", "--run-dir"]
    umask = os.umask(0o27)
    try:
        code, output = project.run(*args, "../run", **where)
        assert (code, WARM in output) == (0, True), output
        warm = facts(project)
        assert (project.root / "left").read_text() == "at the exit"  # buffered until then
        (project.root / "left").unlink()
        plain = project.start(*args, "../run2", **where)
        plain.communicate(timeout=60)
        assert plain.returncode == 0
    finally:
        os.umask(umask)
    cold = json.loads(json.dumps(facts(project)).replace("run2", "run"))
    assert warm == cold
    assert cold["rank 0"]["env"]["SET"] == "now"
    assert cold["rank 0"]["helper"] == 22
    assert project.kept().pid == process.pid

    project.write("conftest.py", "import os\nRANK = int(os.environ['RANK'])")  # each rank collects
    (project.root / "stub/loads").unlink()
    code, output = project.run("test_facts.py", "-v", "--run-dir", "run3", FACTS="facts")
    assert (code, WARM in output) == (0, True), output
    assert "every rank collects for itself" in output
    assert "SET" not in facts(project)["rank 1"]["env"]
    assert not (project.root / "stub/loads").exists()  # torch was loaded once, by the kept process


def test_an_edited_test_is_the_one_that_runs(project: Project) -> None:
    project = replace(project, has_plugins=True)
    project.write("stub/beside.py", BESIDE)
    project.write("stub/beside-1.dist-info/METADATA", "Name: beside\nVersion: 1\n")
    project.write("stub/beside-1.dist-info/entry_points.txt", "[pytest11]\nbeside = beside\n")
    first(project)
    imports = project.root / "imports"
    imports.unlink()
    project.write("test_facts.py", "def test_new():\n    assert 'edit' == 'seen'")
    code, output = project.run("test_facts.py", "-x", "--beside", "4", PYTEST_ADDOPTS="--beside=3")
    assert (code, WARM in output) == (1, True)
    assert "beside: 4" in output
    assert "'edit' == 'seen'" in output
    assert imports.read_text() == "x"  # by the session, and not by the process that was started
    known = project.root / ".pytest_cache/v/cache/lastfailed"
    assert "test_new" in known.read_text()
    code, output = project.run("--lf", "--co", "-q")
    assert (code, "test_facts.py::test_new" in output) == (0, True)
    assert project.run("test_facts.py::test_gone")[0] == 4
    assert len(project.others()) == 1


def test_what_torch_was_loaded_with_ends_an_outdated_process(project: Project) -> None:
    process = first(project)
    code, output = project.run("test_facts.py", FACTS="facts", OMP_NUM_THREADS="2")
    assert (code, "outdated, OMP_NUM_THREADS changed" in output) == (0, True), output
    wait_until(lambda: not psutil.pid_exists(process.pid), "its end")
    assert project.kept().pid != process.pid


MAPPING = """
    import mmap, pathlib

    with pathlib.Path(__file__).with_name("libtorch_cpu.so").open("rb") as file:
        library = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    import packed
"""


def replace_library(project: Project) -> str:
    library = project.root / "stub/libtorch_cpu.so"
    times = library.stat()
    other = library.with_name("new")
    other.write_bytes(b"new!")
    os.utime(other, ns=(times.st_atime_ns, times.st_mtime_ns))
    other.replace(library)
    return "stub/libtorch_cpu.so has changed"


def touch_library(project: Project) -> str:
    (project.root / "stub/libtorch_cpu.so").touch()
    return "stub/libtorch_cpu.so has changed"


def edit_with_the_times_kept(project: Project) -> str:
    file = project.root / "stub/torch.py"
    times = file.stat()
    file.write_text(file.read_text().replace("2.9", "2.8"))
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    return "stub/torch.py has changed"


def edit_an_archive(project: Project) -> str:
    with zipfile.ZipFile(project.root / "stub.zip", "w") as file:
        file.writestr("packed.py", "VALUE = 2")
    return "stub.zip has changed"


def add_a_library_that_goes_before(project: Project) -> str:
    project.write("lib/libtorch_cpu.so", "mine")
    return f"{project.root / 'lib'} has changed"


def add_a_library_beside_one(project: Project) -> str:
    project.write("stub/libgomp.so", "mine")
    return f"{project.root / 'stub'} has changed"


def add_a_module_that_goes_before(project: Project) -> str:
    project.write("src/packed.py", "VALUE = 3")
    return "src/packed.py has the name of a loaded module"


def add_a_sitecustomize(project: Project) -> str:
    project.write("src/sitecustomize.py", "")
    return "outdated, sitecustomize changed"


def test_a_library_that_was_changed_starts_anew(project: Project) -> None:
    project.write("stub/torch.py", MAPPING + TORCH)
    project.write("stub/libtorch_cpu.so", "old!")
    project.write("lib/.keep", "")
    project.write("src/.keep", "")
    with zipfile.ZipFile(project.root / "stub.zip", "w") as file:
        file.writestr("packed.py", "VALUE = 1")
    path = ":".join(str(project.root / name) for name in ("src", "stub", "stub.zip"))
    env = {"PYTHONPATH": path, "LD_LIBRARY_PATH": str(project.root / "lib")}
    project.write("test_none.py", "def test_none():\n    pass")
    assert project.run("test_none.py", **env)[0] == 0
    project.kept()
    (project.root / "hard_link").hardlink_to(project.root / "stub/libtorch_cpu.so")
    code, output = project.run("test_none.py", **env)
    assert (code, WARM in output) == (0, True), output
    for change in (
        replace_library,
        touch_library,
        edit_with_the_times_kept,
        edit_an_archive,
        add_a_library_that_goes_before,
        add_a_library_beside_one,
        add_a_module_that_goes_before,
        add_a_sitecustomize,
    ):
        if change is add_a_sitecustomize:  # after what was not kept because of the module
            (project.root / "src/packed.py").unlink()
            project.run("test_none.py", **env)
        process = project.kept()
        reason = change(project)
        code, output = project.run("test_none.py", **env)
        assert (code, f"{reason}\n" in output) == (0, True), output
        wait_until(lambda pid=process.pid: not psutil.pid_exists(pid), "its end")  # type: ignore[misc]


def test_a_file_that_changes_while_it_is_loaded_is_not_kept(project: Project) -> None:
    edit = "import os, pathlib, sys\nif sys.argv[0] == '-c': pathlib.Path(__file__).touch()\n"
    project.write("stub/torch.py", edit + textwrap.dedent(TORCH))
    project.write("test_none.py", "def test_none():\n    pass")
    project.run("test_none.py")
    wait_until(lambda: not project.others(), "that none is kept")
    code, output = project.run("test_none.py")
    reason = "none could be kept, .*stub/torch.py was changed while it was loaded"
    assert (code, bool(re.search(reason, output))) == (0, True), output


def test_a_file_that_gets_a_second_name_while_it_is_loaded_is_kept(project: Project) -> None:
    link = "import os\nos.link(__file__, f'{__file__}.{os.getpid()}')\n"
    project.write("stub/torch.py", link + textwrap.dedent(TORCH))
    project.write("test_none.py", "def test_none():\n    pass")
    assert project.run("test_none.py")[0] == 0
    assert project.kept().project == str(project.root)


HOOKS = """
    import atexit, pathlib, subprocess

    def note(word):
        with pathlib.Path(__file__).with_name("hooks").open("a") as file:
            file.write(f"{word}\\n")

    note("import")
    atexit.register(note, "exit")

    def pytest_sessionstart(session):
        session.server = subprocess.Popen(["sleep", "600"])
        note("start")

    def pytest_sessionfinish(session):
        session.server.kill()
        session.server.wait()
        note("finish")

    def pytest_unconfigure():
        note("unconfigure")
"""
WHOLE = ["import", "start", "finish", "unconfigure", "exit"]


def test_a_session_that_has_to_start_anew_is_torn_down(project: Project) -> None:
    project.write("conftest.py", HOOKS)
    project.write("test_none.py", "def test_none():\n    print('it ran')")
    project.run("test_none.py")
    project.kept()
    (project.root / "hooks").unlink()
    project.write("test_set.py", "import os\nos.environ['OMP_NUM_THREADS'] = '3'")
    args = ("test_set.py", "test_none.py", "--run-dir", "run", "--junit-xml", "junit.xml")
    code, output = project.run(*args)
    words = (project.root / "hooks").read_text().split()
    assert code == 0, output
    reason = "OMP_NUM_THREADS is set while tests are collected"
    assert f"not used, {reason}" in output
    assert (output.count("1 passed"), "no tests ran" in output) == (1, False), output
    assert words[:5] == WHOLE, words
    assert words.count("start") == words.count("finish") == 2
    assert words.count("unconfigure") == 2
    wait_until(lambda: not project.others(), "the end of its server, and that none is kept")
    assert f"none could be kept, {reason}" in project.run("test_none.py")[1]


def test_import_hooks_see_torch(project: Project) -> None:
    project.write("test_none.py", "def test_none():\n    pass")
    project.run("test_none.py")
    project.kept()
    hook = """
        import pathlib, sys

        class Finder:
            def find_spec(self, name, path=None, target=None):
                with pathlib.Path(__file__).with_name("seen").open("a") as file:
                    file.write(f"{name} ")

        sys.meta_path.insert(0, Finder())
    """
    project.write("conftest.py", hook)
    project.write("test_none.py", "import torch\ndef test_none():\n    pass")
    code, output = project.run("test_none.py")
    assert (code, "not used, conftest.Finder is a hook of imports" in output) == (0, True), output
    assert "torch" in (project.root / "seen").read_text().split()
    wait_until(lambda: not project.others(), "that none is kept")


def test_what_a_session_took_from_itself_is_not_kept(project: Project) -> None:
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_CORE, (0, 0))"
    project.write("conftest.py", limit)
    project.write("test_none.py", "def test_none():\n    pass")
    project.run("test_none.py")
    wait_until(lambda: not project.others(), "that none is kept")
    (project.root / "conftest.py").unlink()
    code, output = project.run("test_none.py")
    assert (code, "none could be kept, the session changed" in output) == (0, True), output


SLOW = """
    import os, pathlib, time

    def test_slow():
        pathlib.Path(f"began{os.environ['RANK']}").touch()
        time.sleep(60)
"""


def test_nothing_is_left_of_a_session_that_was_killed(project: Project) -> None:
    process = first(project)
    project.write("test_slow.py", SLOW)
    for way, code in {"interrupt": 2, "client": -9, "session": -9, "kept": 3}.items():
        session = project.start("--keep-gangs=10", "test_slow.py")
        wait_until((project.root / "began1").exists, "the test")
        assert "after 1 session" in project.command("gangs", "list")
        if way == "interrupt":
            session.send_signal(signal.SIGINT)
        elif way == "client":
            session.kill()
        elif way == "session":
            psutil.Process(process.pid).children()[0].kill()
        else:
            os.kill(process.pid, signal.SIGKILL)
        output, _ = session.communicate(timeout=60)
        wait_until(lambda: not project.others(process.pid), "the end of its processes")
        assert (session.returncode, "Traceback" in output) == (code, False), output
        if way != "kept":
            shown = project.command("gangs", "list")
            assert re.search(rf"{project.root} +{process.pid} .* in 10 min", shown)
        (project.root / "began1").unlink()
    assert "was killed; start the session again" in output
    assert project.command("gangs", "list") == "no gangs are kept\n"
    assert project.records() == []


def test_a_process_that_no_session_can_find_ends(project: Project) -> None:
    for lost in ("record", "socket"):
        process = first(project)
        if lost == "record":
            project.records()[0].write_text("{}")
        else:
            Path(process.address.partition(":")[2]).unlink()
        wait_until(lambda: not project.others() and not project.records(), "its end")
    first(project)


def test_the_end_of_the_terminal_ends_them(project: Project) -> None:
    shell, terminal = pty.fork()
    if shell == 0:
        os.chdir(project.root)
        words = ("-m", "pytest", "-p", "megatron", "--ranks", "2", "--keep-gangs", "-q")
        for _ in range(2):
            subprocess.run([sys.executable, *words], env=project.env(FACTS="facts"), check=False)
        os.read(0, 1)  # as a shell that waits for the next command
        os._exit(0)
    process = project.kept()
    output = b""
    while output.count(b"1 passed") < 2:  # the second one runs in the kept process
        output += os.read(terminal, 1 << 16)
    assert psutil.pid_exists(process.pid)
    os.close(terminal)
    os.waitpid(shell, 0)
    wait_until(lambda: not project.others(), "its end with the terminal")


def test_stop_ends_one_that_loads_torch(project: Project) -> None:
    project.write("stub/torch.py", LOADING + TORCH)
    project.write("test_none.py", "def test_none():\n    pass")
    assert project.run("test_none.py")[0] == 0
    wait_until((project.root / "loading").exists, "that it loads")
    assert "loads torch" in project.command("gangs", "list")
    code, output = project.run("test_none.py")
    assert (code, "not used, its process still loads torch" in output) == (0, True), output
    assert project.command("gangs", "stop").startswith("stopped: process ")
    wait_until(lambda: not project.others(), "its end")


def test_stop_ends_them_and_time_does(project: Project) -> None:
    process = first(project)
    assert project.command("gangs", "stop") == f"stopped: process {process.pid} of {project.root}\n"
    wait_until(lambda: not project.others() and not project.records(), "its end")
    assert project.command("gangs", "stop", "--all") == "no gangs are kept\n"
    first(project, "--keep-gangs=0.01")
    wait_until(lambda: not project.others() and not project.records(), "its end by time")


def test_an_editor_that_calls_pytest_main_profits_and_goes_on(
    project: Project, tmp_path_factory: pytest.TempPathFactory
) -> None:
    files = tmp_path_factory.mktemp("python_files")
    script = files / "vscode_pytest/run_pytest_script.py"
    script.parent.mkdir()
    script.write_text(textwrap.dedent(RUNNER))
    script.with_name("__init__.py").write_text(textwrap.dedent(RUNNER_PLUGIN))
    project.write("test_editor.py", RUNNER_TESTS)
    project.write("pytest.ini", "[pytest]\npythonpath = src")

    def click(*names: str) -> tuple[list[str], str]:
        """Run tests as the editor does; return what it learns, and what it shows."""
        results = project.root / "results"
        results.unlink(missing_ok=True)
        (project.root / "ids").write_text("\n".join(f"test_editor.py::{n}" for n in names))
        done = subprocess.run(
            [sys.executable, script, "--rootdir=.", "-p", "megatron", "--ranks=2", "--keep-gangs"],
            cwd=project.root,
            env=project.env(
                IDS="ids",
                RESULTS="results",
                PYTHONPATH=f"{files}:{project.root / 'stub'}",
            ),
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.endswith("the runner goes on, and PATH begins with /scripts\n")
        assert not (project.root / "ids").exists()
        return results.read_text().splitlines(), done.stdout + done.stderr

    learnt, shown = click("test_good", "test_bad")
    cold = ["test_editor.py::test_good passed", "test_editor.py::test_bad failed", "end 1"]
    assert (learnt, "none was kept yet" in shown) == (cold, True), shown
    process = project.kept()
    (project.root / "stub/loads").unlink()
    learnt, shown = click("test_good", "test_bad")
    assert (learnt, WARM in shown) == (cold, True), shown
    project.write("helper.py", "VALUE = 2")
    learnt, shown = click("test_bad")
    assert (learnt, WARM in shown) == ([cold[1].replace("failed", "passed"), "end 0"], True)
    learnt, shown = click("test_gone")
    assert (learnt, "not found: " in shown) == (["end 4"], True)
    assert not (project.root / "stub/loads").exists()
    assert project.kept().pid == process.pid


def test_a_program_that_reads_what_pytest_main_left_runs_without(project: Project) -> None:
    first(project)
    project.write("test_editor.py", RUNNER_TESTS)
    call = "pytest.main([*sys.argv[1:], pathlib.Path('test_editor.py')])"
    program = f"import pathlib, sys, pytest; {call}; print('helper' in sys.modules)"
    words = ["-p", "megatron", "--ranks=2", "--keep-gangs"]
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        cwd=project.root,
        env=project.env(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert "kept gangs: not used, pytest was called by another program" in done.stdout
    assert done.stdout.endswith("True\n")

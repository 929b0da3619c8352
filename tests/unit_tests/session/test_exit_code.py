"""What calls `os._exit(0)` or `sys.exit(0)` in pytest's own process hides no failure."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FAILS = "def test_fails(): assert 0\n"
PASSES = "def test_passes(): pass\n"
AT_EXIT = "import atexit, os\natexit.register(os._exit, 0)\n"
IN_TEARDOWN = """
import os, pytest
@pytest.fixture
def ends():
    yield
    os._exit(0)
def test_ends(ends): pass
"""
IN_THREAD = """
import os, threading
def test_ends():
    thread = threading.Thread(target=os._exit, args=(0,))
    thread.start()
    thread.join()
"""
IN_C = "import atexit, ctypes\natexit.register(ctypes.CDLL(None)._exit, 0)\n"
FORKS = """
import os
def test_forks():
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
"""


def hook(name: str, body: str) -> str:
    return f"import os, sys\ndef pytest_{name}(session, exitstatus): {body}\n".replace(
        "unconfigure(session, exitstatus)", "unconfigure()"
    )


CASES = {
    "a module's exit function": ("", AT_EXIT + FAILS, 1, "os._exit(0) was called by "),
    "a conftest's exit function": (AT_EXIT, FAILS, 1, "the session failed, exit code 1"),
    "a teardown": ("", IN_TEARDOWN, 1, "by ends of "),
    "a thread": ("", IN_THREAD, 1, "the session had not ended, exit code 1"),
    "sys.exit at the end": (hook("sessionfinish", "sys.exit()"), FAILS, 1, "by a hook"),
    "sys.exit at last": (hook("unconfigure", "sys.exit(0)"), FAILS, 1, "by a hook"),
    "os._exit at last": (hook("unconfigure", "os._exit(0)"), FAILS, 1, "by pytest_unconfigure"),
    "no test": (AT_EXIT, "", 5, "exit code 5"),
    # What must not become a failure.
    "nothing failed": (AT_EXIT, PASSES, 0, ""),
    "the code of a hook": (hook("sessionfinish", "os._exit(exitstatus)"), PASSES, 0, ""),
    "another code": (hook("unconfigure", "os._exit(7)"), FAILS, 7, ""),
    "what a hook has decided": (hook("sessionfinish", "session.exitstatus = 0"), FAILS, 0, ""),
    "a forked child": ("", FORKS, 0, ""),
}


def run(directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "COV_"))}
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    command = [str(Path(sys.executable).with_name(words[0])), *words[1:]]
    return subprocess.run(
        command, cwd=directory, env=env, capture_output=True, text=True, check=False, timeout=60
    )


@pytest.mark.parametrize("name", CASES)
def test_a_session_ends_with_its_own_code(name: str, tmp_path: Path) -> None:
    conftest, module, code, said = CASES[name]
    (tmp_path / "conftest.py").write_text(conftest)
    (tmp_path / "test_m.py").write_text(module)
    done = run(tmp_path, "pytest", "-p", "megatron", "-q")
    assert done.returncode == code, done.stdout + done.stderr
    assert said in done.stderr
    assert bool(said) == ("megatron: " in done.stderr)


def test_the_summary_of_ci_trusts_no_exit_code(tmp_path: Path) -> None:
    (tmp_path / "test_m.py").write_text(IN_C + FAILS)
    job = tmp_path / "job"
    done = run(tmp_path, "pytest", "-p", "megatron", "--run-dir", str(job / "run"))
    assert done.returncode == 0  # C code ended it
    summary = run(tmp_path, "pytest-megatron", "ci", "summary", str(job))
    assert summary.returncode == 1, summary.stdout + summary.stderr
    assert "pytest ended with exit code 1, and no item says why" in summary.stdout


def test_a_program_that_calls_pytest_ends_as_it_will(tmp_path: Path) -> None:
    (tmp_path / "test_m.py").write_text(FAILS)
    (tmp_path / "program.py").write_text(
        "import os, pytest\npytest.main(['-p', 'megatron'])\nos._exit(0)\n"
    )
    assert run(tmp_path, "python", "program.py").returncode == 0

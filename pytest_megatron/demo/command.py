"""`pytest-megatron demo`: a small project in a directory of its own, and a run of it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import click

from pytest_megatron.base.command import EXIT_FAILED, PATH
from pytest_megatron.base.text import counted
from pytest_megatron.errors import HostError
from pytest_megatron.runs.find import kept_runs

# Their names end in .txt, so that no tool takes them for files of this package.
_FILES = Path(__file__).parent / "templates"
_RECORD = "-p megatron recipes --golden record"
_RUN = "-p megatron --ranks 2 tests recipes"
_NOT_INHERITED = ("GIT_", "PYTEST_", "SLURM_")  # of what surrounds the demo: a hook, a test, a job
_AUTHOR = ("-c", "user.name=pytest-megatron demo", "-c", "user.email=demo@localhost")
_SHOWN = """
The tests in test_sums.py pass on a gang of two ranks, and the workload is bitwise equal to its
golden. The test in test_hang.py hangs on purpose: its failure names the rank that waited and the
line, and the next test runs on a new gang.
"""
_NEXT = """
Next, in {directory}:
  # after removing the mistake in tests/test_hang.py:
  pytest -p megatron --ranks 4 tests
  # after setting --lr to 0.051 in tests/functional_tests/test_cases/demo/line/model_config.yaml:
  pytest -p megatron recipes
  # after breaking an assertion, to stop in the rank that fails:
  pytest -p megatron --ranks 2 --pdb tests/test_sums.py
"""


@click.command(name="demo")
@click.argument("directory", type=PATH, default=Path("pytest-megatron-demo"))
def command(*, directory: Path) -> None:
    """Write a small project into an empty DIRECTORY, and run it on two ranks of the CPU.

    It has distributed tests, one that hangs, and a recipe whose golden is recorded by training.
    Exits with 2 if it cannot run here, or pytest ends in another way.
    """
    if importlib.util.find_spec("torch") is None:
        raise HostError(
            "demo",
            f"{sys.executable} has no torch, which ranks and the training need; install it there"
            " (CPU build: pip install torch --index-url https://download.pytorch.org/whl/cpu)",
        )
    try:
        num_files = _write(directory)
    except OSError as error:
        where = str(error.filename or directory)
        raise HostError(where, f"{error.strerror}; name a directory that can be written") from error
    _git(directory, "-c", "init.defaultBranch=main", "init", "--quiet")
    _commit(directory, "Write the demo")
    click.echo(f"wrote {counted(num_files, 'file')} to {directory}, and committed them there")
    _record(directory)
    _run(directory)
    click.echo(_SHOWN)
    page = kept_runs(directory)[0].directory / "index.html"
    click.echo(f"open the page of this run: {page.resolve().as_uri()}")
    click.echo(_NEXT.format(directory=directory), nl=False)


def _write(directory: Path) -> int:
    """Write the files of the project and return how many these are.

    Raises:
        HostError: There is something in the directory already.
        OSError: It cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        raise HostError(
            str(directory), "is not empty, expected an empty directory or none; name another"
        )
    sources = sorted(_FILES.rglob("*.txt"))
    for source in sources:
        target = directory / source.relative_to(_FILES).with_suffix("")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(source.read_bytes())
    return len(sources)


def _commit(directory: Path, message: str) -> None:
    """Commit every file, in the demo's own repository and by an author of its own."""
    _git(directory, "add", "--all")
    _git(directory, *_AUTHOR, "commit", "--quiet", "--message", message)


def _git(directory: Path, *arguments: str) -> None:
    """Run git without any settings of the user.

    Raises:
        HostError: It is missing, or fails.
    """
    # Without a home there is no file of settings, for any version of git.
    own = {"HOME": os.devnull, "XDG_CONFIG_HOME": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    try:
        subprocess.run(
            ["git", *arguments],  # noqa: S607 - the user's
            cwd=directory,
            env={**_environment(), **own},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=True,
        )
    except FileNotFoundError as error:
        raise HostError(
            "demo", "git is missing, which goldens need to name their commit; install it"
        ) from error
    except subprocess.CalledProcessError as error:
        problem = " ".join(str(error.stdout).split())
        raise HostError(f"git in {directory}", problem) from error


def _environment() -> Mapping[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith(_NOT_INHERITED)}


def _record(directory: Path) -> None:
    """Record and commit the golden.

    Raises:
        HostError: No golden was recorded.
    """
    click.echo(f"\n$ pytest {_RECORD}\ntraining twice, until both curves agree ...")
    code, output = _pytest(directory, _RECORD, is_quiet=True)
    goldens = sorted(directory.glob("golden_values/**/*.json"))
    if code != 0 or not goldens:
        click.echo(output)
        raise HostError("demo", f"no golden was recorded, pytest ended with exit code {code}")
    _commit(directory, "Record the golden")
    for golden in goldens:
        click.echo(f"recorded and committed {golden.relative_to(directory)}")


def _run(directory: Path) -> None:
    """Run everything; one test fails.

    Raises:
        HostError: pytest ended in another way.
    """
    click.echo(f"\n$ pytest {_RUN}")
    code, _ = _pytest(directory, _RUN, is_quiet=False)
    if code != EXIT_FAILED:
        raise HostError("demo", f"pytest is expected to end with exit code 1, it was {code}")


def _pytest(directory: Path, arguments: str, *, is_quiet: bool) -> tuple[int, str]:
    """Return the exit code of pytest, and what it printed if that is not shown."""
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *arguments.split()],
        cwd=directory,
        env={**_environment(), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        stdout=subprocess.PIPE if is_quiet else None,
        stderr=subprocess.STDOUT if is_quiet else None,
        text=True,
        errors="replace",
    )
    try:
        output, _ = process.communicate()
    except KeyboardInterrupt:  # pytest has it too, and needs a moment to end its ranks
        process.communicate()
        raise
    return process.returncode, output or ""

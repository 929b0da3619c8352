"""Runs an item at commits, each in a worktree of its own (effects: git, processes, files).

The user's tree is never touched: git only gets the entries of the worktrees, which are removed at
the end.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from pytest_megatron.base.project import run_git
from pytest_megatron.base.text import describe_exit, shorten
from pytest_megatron.culprit.search import CulpritRun, CulpritState, Outcome
from pytest_megatron.errors import CiError, CulpritError
from pytest_megatron.process.guarded import CommandEnd, GuardedProcess
from pytest_megatron.runs.choose import read_own_item
from pytest_megatron.runs.junit import JUnitCase, read_junit
from pytest_megatron.runs.record import RecordedExecution, RecordedItem
from pytest_megatron.session.again import PYTEST_EXITS, environment_with

RUN_DIR = "RUN_DIR"  # in the command of a search
_GRACE_S = 30.0  # for pytest to end its ranks
_MOST_CHARS = 160
_CONFIGS = ("pytest.ini", "pyproject.toml")
_RECORDED: Mapping[str, Outcome] = {
    "passed": "passed",
    "flaky": "passed",
    "failed": "failed",
    "broken": "broken",
    "skipped": "untestable",
}


def commits_between(root: Path, good: str, bad: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the commits from `good` to `bad` along first parents, and their subjects.

    Raises:
        CulpritError: One of them is no commit, or `good` is no ancestor of `bad`.
    """
    first, last = _commit(root, "--good", good), _commit(root, "--bad", bad)
    if run_git(root, "merge-base", "--is-ancestor", first, last).returncode or first == last:
        base = _ask(root, "merge-base", first, last)
        way = f"give their merge base {base}" if base else "is the clone shallow?"
        raise CulpritError("--good", f"{good!r} is no earlier commit than --bad {bad!r}; {way}")
    listed = _ask(root, "log", "--first-parent", "--reverse", "--format=%H %s", f"{first}..{last}")
    rows = [_ask(root, "log", "-1", "--format=%H %s", first), *listed.splitlines()]
    pairs = [row.partition(" ") for row in rows]
    return tuple(pair[0] for pair in pairs), tuple(pair[2] for pair in pairs)


def _commit(root: Path, option: str, name: str) -> str:
    """Return the full id of a commit that an option names."""
    found = _ask(root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
    if not found:
        raise CulpritError(option, f"{name!r} is no commit of {root}, expected one")
    return found


def _ask(root: Path, *arguments: str) -> str:
    return run_git(root, *arguments).stdout.decode("utf-8", "replace").strip()


def number_of_parents(root: Path, commit: str) -> int:
    """Return how many parents a commit has; a merge has several."""
    return len(_ask(root, "rev-list", "--parents", "-1", commit).split()) - 1


@dataclass
class Worktrees:
    """Worktrees of commits below a directory; as a context manager it removes them.

    Attributes:
        root: The user's checkout.
        place: The directory of the search.
    """

    root: Path
    place: Path
    made: dict[str, str] = field(default_factory=dict)

    def __enter__(self) -> Self:
        self.place.mkdir(parents=True, exist_ok=True)
        for name in _CONFIGS:  # pytest and we look for them upwards, into the user's tree
            (self.place / name).touch()
        return self

    def __exit__(self, *_: object) -> None:
        for commit in self.made:
            self._remove(self._path(commit))

    def at(self, commit: str, state: CulpritState) -> tuple[Path, str]:
        """Return the worktree of a commit, and why it cannot be used, or nothing.

        Raises:
            CulpritError: git cannot make it.
        """
        path = self._path(commit)
        if commit not in self.made:
            self._add(path, commit)
            self.made[commit] = self._set_up(path, state) if state.setup else ""
        return path, self.made[commit]

    def _path(self, commit: str) -> Path:
        return self.place / "worktrees" / commit

    def _add(self, path: Path, commit: str) -> None:
        """Check a commit out into a worktree."""
        self._remove(path)  # of a search that was killed
        made = self._git("worktree", "add", "--detach", "--force", str(path), commit)
        if made.returncode:
            problem = shorten(made.stderr.decode("utf-8", "replace"), _MOST_CHARS)
            raise CulpritError(str(path), f"git cannot make a worktree of {commit}: {problem}")
        self.made[commit] = "is not set up"

    def _remove(self, path: Path) -> None:
        """Remove a worktree, and what git knows of it."""
        self._git("worktree", "remove", "--force", str(path))
        shutil.rmtree(path, ignore_errors=True)
        self._git("worktree", "prune")

    def _git(self, *words: str) -> subprocess.CompletedProcess[bytes]:
        return run_git(self.root, "-c", f"core.hooksPath={os.devnull}", *words)

    def _set_up(self, path: Path, state: CulpritState) -> str:
        """Run the set-up line in a worktree; return why it failed, "" if it did not."""
        log = self.place / f"setup_{path.name}.log"
        command = ("sh", "-c", state.setup)
        end = _run(command, path / state.prefix, environment_with({}), log, state.time_limit_s)
        if end is None:
            return f"the set-up did not end within {state.time_limit_s:g} s; see {log}"
        return f"the set-up {describe_exit(end.returncode)}; see {log}" if end.returncode else ""


def run_at(trees: Worktrees, state: CulpritState, position: int) -> CulpritRun:
    """Run the item of a search once at a commit, and judge it.

    Raises:
        CulpritError: git cannot make a worktree.
        KeyboardInterrupt: Ctrl-C, once pytest has ended its processes.
    """
    tree, problem = trees.at(state.commits[position], state)
    if problem:
        return CulpritRun(position=position, outcome="untestable", problem=problem)
    run_dir = trees.place / f"run_{len(state.runs) + 1}"
    log, report = run_dir.with_suffix(".log"), run_dir.with_suffix(".xml")
    shutil.rmtree(run_dir, ignore_errors=True)  # of a run that was interrupted
    report.unlink(missing_ok=True)
    project = tree / state.prefix
    own = project / ".venv" / "bin" / "python"
    argv = [str(run_dir) if word == RUN_DIR else word for word in state.argv]
    has_own = bool(state.setup) and own.exists()
    argv[0] = str(own) if has_own else sys.executable
    argv += ["--confcutdir", ".", "--junit-xml", str(report), "-o", "junit_family=xunit2"]
    env = environment_with(state.env)
    if not has_own:  # above an editable installation of the user's tree
        inherited = (env["PYTHONPATH"],) if env.get("PYTHONPATH") else ()
        env["PYTHONPATH"] = os.pathsep.join((str(project), str(project / "src"), *inherited))
    begun = time.monotonic()
    end = _run(argv, project, env, log, state.time_limit_s)
    if end is None:
        outcome: Outcome = "failed"
        problem = f"did not end within {state.time_limit_s:g} s"
    else:
        outcome, problem = judge(end.returncode, read_own_item(run_dir, state.item), _cases(report))
    problem = shorten(problem, _MOST_CHARS)
    return CulpritRun(
        position=position,
        outcome=outcome,
        problem=f"{problem}; see {log}" if outcome == "untestable" else problem,
        duration_s=round(time.monotonic() - begun, 3),
        log=log.name,
    )


def judge(
    returncode: int, record: RecordedItem | None, cases: Sequence[JUnitCase]
) -> tuple[Outcome, str]:
    """Return the outcome of a run of one item, and the reason.

    Args:
        returncode: Return code of pytest.
        record: Record of the item in `run.json`; None for a test that runs on no gang.
        cases: Cases of the JUnit XML; none if pytest wrote no report.
    """
    if record is not None:
        last = record.attempts[-1] if record.attempts else None
        is_again = isinstance(last, RecordedExecution) and last.is_transient
        outcome = _RECORDED[record.verdict]
        return "broken" if outcome == "failed" and is_again else outcome, record.headline
    if returncode < 0:
        ended = f"pytest {describe_exit(returncode)}"
        return "broken" if returncode == -signal.SIGKILL else "failed", ended
    problem = next((case.message for case in cases if case.outcome != "passed"), "")
    kinds = {case.outcome for case in cases}
    if returncode not in (0, 1) or not kinds:
        why = PYTEST_EXITS.get(returncode, "pytest left no report of it")
        return "broken" if returncode == 3 else "untestable", why  # noqa: PLR2004 - an error in pytest
    if returncode == 1:
        return "failed", problem
    return ("untestable", f"skipped: {problem}") if kinds == {"skipped"} else ("passed", "")


def _cases(report: Path) -> tuple[JUnitCase, ...]:
    """Return the cases of a JUnit file, none if it cannot be read."""
    try:
        return read_junit(report).cases
    except CiError:
        return ()


def _run(
    command: Iterable[str], cwd: Path, env: Mapping[str, str], log: Path, limit_s: float
) -> CommandEnd | None:
    """Run a command to its end; None if its time limit ended it."""
    deadline = time.monotonic() + limit_s
    with GuardedProcess(tuple(command), env=env, cwd=cwd, output=log, grace_s=_GRACE_S) as process:
        while (end := process.poll(1.0)) is None and time.monotonic() < deadline:
            pass
        return end

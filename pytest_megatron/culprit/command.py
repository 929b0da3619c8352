"""`pytest-megatron culprit`: the commit from which on an item fails.

The item runs at each commit in a worktree of its own. The user's tree is never touched: git only
gets the entries of the worktrees, which are removed at the end.
"""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import click

from pytest_megatron.base.command import EXIT_FAILED, PATH
from pytest_megatron.base.files import write_json_atomically
from pytest_megatron.base.project import SHORT_COMMIT, ask_git, load_config, run_git
from pytest_megatron.base.schema import SchemaError, closed, validate
from pytest_megatron.base.text import counted, describe_exit, printable, shorten
from pytest_megatron.culprit.search import (
    CulpritReport,
    CulpritRun,
    CulpritState,
    Outcome,
    next_position,
    report_of,
)
from pytest_megatron.errors import CiError, ConfigError, CulpritError
from pytest_megatron.process.guarded import CommandEnd, GuardedProcess
from pytest_megatron.runs.find import check_node_id, choose, find_runs, read_own_item, read_own_run
from pytest_megatron.runs.headline import headline_fingerprint
from pytest_megatron.runs.history import misleading_share, read
from pytest_megatron.runs.junit import JUnitCase, read_junit
from pytest_megatron.runs.layout import HISTORY_FILE, OWN_DIR, RUNS_DIR, make_own_dir
from pytest_megatron.runs.record import RecordedExecution, RecordedItem, read_record, to_json
from pytest_megatron.session.again import (
    PYTEST_EXITS,
    Again,
    Wishes,
    command_for,
    environment_with,
    pytest_argv,
)

_STATE, _REPORT = "state.json", "culprit.json"
_INTERRUPTED = 130


@closed
@dataclass(frozen=True, kw_only=True)
class CulpritTable:
    """`[tool.pytest-megatron.culprit]`."""

    setup: str = ""


@click.command(name="culprit")
@click.argument("item", required=False)
@click.option("--good", metavar="COMMIT", help="At which the item passes.")
@click.option("--bad", metavar="COMMIT", default="HEAD", show_default=True, help="And fails.")
@click.option("--run", "source", type=PATH, help="A run or artifact with the item and its options.")
@click.option("--pytest-args", default="", metavar="TEXT", help="More arguments for pytest.")
@click.option("--setup", metavar="LINE", help="Shell line that prepares the worktree of a commit.")
@click.option(
    "--flake-rate",
    type=click.FloatRange(0.0, 0.95),
    metavar="SHARE",
    help="Share of runs that mislead; by default of the history, if it has any.",
)
@click.option("--history", type=PATH, metavar="FILE", help="The file that runs append to.")
@click.option(
    "--time-limit",
    "time_limit_s",
    type=click.FloatRange(min=1.0),
    default=3600.0,
    metavar="S",
    show_default=True,
    help="Seconds after which a run is ended, and counts as failed.",
)
@click.option(
    "--max-runs", type=click.IntRange(min=2), default=200, show_default=True, help="Then give up."
)
@click.option("--resume", type=PATH, metavar="DIRECTORY", help="Go on with a search.")
@click.option("--project", type=PATH, default=Path(), help="The checkout.")
def command(  # noqa: PLR0913 - one for each option
    *,
    item: str | None,
    good: str | None,
    bad: str,
    source: Path | None,
    pytest_args: str,
    setup: str | None,
    flake_rate: float | None,
    history: Path | None,
    time_limit_s: float,
    max_runs: int,
    resume: Path | None,
    project: Path,
) -> None:
    """Find the commit from which on ITEM, a node id, fails.

    Each commit is run in a worktree of its own; the checkout is not touched. Noisy outcomes are
    repeated until one commit is the first bad one with a probability of 98 %.

    Exit code 0: it is found. 1: several commits are left. 2: the input is unusable, or an end is
    not as it has to be.
    """
    root = project.absolute()
    if resume is not None:
        place, state = resume.absolute(), read_record(resume / _STATE, CulpritState)
    elif item is None or good is None:
        raise CulpritError("ITEM, --good", "are needed to begin a search, expected both")
    else:
        again = _command(root, item, source, pytest_args)
        commits, subjects = commits_between(root, good, bad)
        node_id = again.argv[-1]
        rate, origin = _flake_rate(root, node_id, flake_rate, history)
        place = _new_place(root)
        state = CulpritState(
            item=node_id,
            prefix=ask_git(root, "rev-parse", "--show-prefix") or "",
            commits=commits,
            subjects=subjects,
            flake_rate=rate,
            argv=again.argv,
            env=dict(again.env),
            setup=_setup(root) if setup is None else setup,
            time_limit_s=time_limit_s,
            max_runs=max_runs,
        )
        _print_head(state, again, origin)
    try:
        state = _search(root, place, state)
    except KeyboardInterrupt:
        shown = shlex.quote(_from_here(place))
        click.echo(f"\ninterrupted; go on with: pytest-megatron culprit --resume {shown}")
        sys.exit(_INTERRUPTED)
    report = report_of(state)
    write_json_atomically(place / _REPORT, to_json(report))
    for line in _result_lines(root, state, report):
        click.echo(printable(line))
    click.echo(f"wrote {_from_here(place / _REPORT)}")
    sys.exit(0 if report.commit else EXIT_FAILED)


def _search(root: Path, place: Path, state: CulpritState) -> CulpritState:
    """Run the item until the search is over; the state is written after each run."""
    with Worktrees(root, place) as trees:
        write_json_atomically(place / _STATE, to_json(state))
        while (position := next_position(state)) is not None:
            run = run_at(trees, state, position)
            state = replace(state, runs=(*state.runs, run))
            write_json_atomically(place / _STATE, to_json(state))
            end = {0: "--good ", state.bad_end: "--bad "}.get(position, "")
            problem = f": {run.problem}" if run.problem else ""
            name = f"run {len(state.runs)}, {end}{state.name(position)}"
            click.echo(printable(f"  {name}: {run.outcome}{problem}"))
    return state


def _new_place(root: Path) -> Path:
    """Return a new directory for a search."""
    make_own_dir(root)
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    place = root / OWN_DIR / "culprit" / name
    place.mkdir(parents=True)
    return place


def _command(root: Path, item: str, source: Path | None, pytest_args: str) -> Again:
    """Return the command that runs an item; that of its run where one is given."""
    words = tuple(shlex.split(pytest_args))
    if source is None:
        check_node_id(item, "ITEM")
        is_row = item.partition("::")[0].endswith((".yaml", ".yml"))
        once = ("--megatron-n-repeat", "1", "--megatron-max-attempts", "1") if is_row else ()
        argv = pytest_argv(sys.executable, RUN_DIR, (*once, *words, item))
        return Again(argv=argv, env={})
    with tempfile.TemporaryDirectory(prefix="pytest-megatron-culprit-") as scratch:
        runs = find_runs([source], Path(scratch), lambda _: False, looks_up=True)
        records = {run.directory: read_own_run(run.directory) for run in runs}
        chosen = choose(records, item, where=str(source))
        is_own = chosen.run_dir.resolve().is_relative_to((root / RUNS_DIR).resolve())
        return command_for(
            chosen,
            Wishes(is_trusted=is_own, words=words),
            (),
            run_dir=RUN_DIR,
        )


def _setup(root: Path) -> str:
    """Return the line that prepares a worktree, from the project's settings."""
    config = load_config(root)
    try:
        return validate(CulpritTable, config.tables.get("culprit", {})).setup
    except SchemaError as error:
        where = f"{config.file}: [tool.pytest-megatron.culprit]"
        raise ConfigError(where, str(error)) from None


def _flake_rate(
    root: Path, node_id: str, asked: float | None, path: Path | None
) -> tuple[float | None, str]:
    """Return the share of runs that mislead, and its origin in words."""
    if asked is not None:
        return asked, f"{asked:.0%}"
    file = path or root / OWN_DIR / HISTORY_FILE
    if path is not None and not path.is_file():
        raise CulpritError("--history", f"{path} is no file, expected one that runs append to")
    try:
        found = misleading_share(read(file).entries, node_id)
    except OSError as error:
        raise CulpritError(str(file), f"cannot be read: {error.strerror}") from error
    if found is None:
        return None, "not known"
    share = found[0] / found[1]
    return share, f"{share:.0%}, {found[0]} of {counted(found[1], 'run')} in the history"


def _print_head(state: CulpritState, again: Again, origin: str) -> None:
    """Print what is searched, and under which assumptions."""
    number = counted(state.bad_end, "commit")
    click.echo(printable(f"culprit: {state.item}, {number} up to {state.name(state.bad_end)}"))
    click.echo(f"  flake rate: {origin}")
    for line in again.left_out:
        click.echo(printable(f"  {line}"))
    click.echo(printable(f"  {again.line}"))


def _result_lines(root: Path, state: CulpritState, report: CulpritReport) -> Iterator[str]:
    """Yield the answer of a search: the commit, its failures, what is uncertain."""
    chance = f"{report.probability:.1%}"
    names = dict(zip(state.commits, state.subjects, strict=True))
    if report.commit is not None:
        place = state.commits.index(report.commit)
        yield f"first bad commit, {chance}: {state.name(place)}"
        yield f"  at it: {state.counts(place)}; before it: {state.counts(place - 1)}"
        if number_of_parents(root, report.commit) > 1:
            yield "  it is a merge; a search in what it merged needs --good and --bad of its own"
        yield from _other_failures(state, place)
    else:
        left = counted(len(report.candidates), "commit")
        yield f"{left} left, {chance}: no run separates them, or --max-runs is reached"
        yield from (f"  {commit[:SHORT_COMMIT]} {names[commit]}" for commit in report.candidates)
    untestable = len(state.untestable)
    could_not = f", {untestable} could not be run" if untestable else ""
    seen = len({run.position for run in state.runs})
    yield f"{counted(report.num_runs, 'run')} of {counted(seen, 'commit')}{could_not}"


def _other_failures(state: CulpritState, place: int) -> Iterator[str]:
    """Yield a line where the first bad commit fails in another way than the bad end."""
    here, there = (state.of(position, "failed") for position in (place, state.bad_end))
    kinds = [{headline_fingerprint(run.problem) for run in runs} for runs in (here, there)]
    if here and there and kinds[0].isdisjoint(kinds[1]):
        yield f"  it fails there with: {here[-1].problem}"
        yield f"  and at --bad with:   {there[-1].problem}"


def _from_here(path: Path) -> str:
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


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


def run_at(worktrees: Worktrees, state: CulpritState, position: int) -> CulpritRun:
    """Run the item of a search once at a commit, and judge it.

    Raises:
        CulpritError: git cannot make a worktree.
        KeyboardInterrupt: Ctrl-C, once pytest has ended its processes.
    """
    tree, problem = worktrees.at(state.commits[position], state)
    if problem:
        return CulpritRun(position=position, outcome="untestable", problem=problem)
    run_dir = worktrees.place / f"run_{len(state.runs) + 1}"
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

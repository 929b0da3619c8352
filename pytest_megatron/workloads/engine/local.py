"""Local engine: attempts run on this machine one at a time, on leased GPUs. Opens other engines.

Phases are forked from processes that have imported torch already; see `warm_process`. A rank that
is forked must be what a fresh interpreter would have been. So each environment has a process of its
own, and a program that could tell the difference is started afresh, with the reason in the
launcher's log.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.metadata
import json
import logging
import os
import select
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

from pytest_megatron.base.text import one_of
from pytest_megatron.errors import LaunchError
from pytest_megatron.gpu.health import HealthWatch
from pytest_megatron.gpu.host import CPU_PLATFORM, Gpu, Host, Lease, lease_gpus
from pytest_megatron.process.guarded import Guard, GuardedProcess, GuardStart, execute_guard
from pytest_megatron.workloads.engine.api import (
    GROUP,
    Engine,
    EngineContext,
    Planned,
    Resources,
    Submission,
    SubmissionOutcome,
    SubmissionPhase,
    Update,
)
from pytest_megatron.workloads.engine.warm_process import (
    PRELOADED,
    PRELOADED_FOR_MEGATRON,
    PRELOADED_FOR_OPTIMIZERS,
    receive,
    send,
)
from pytest_megatron.workloads.recipe.case import Launcher
from pytest_megatron.workloads.recipe.model import Workload
from pytest_megatron.workloads.training.plan.plan import PhasePlan, Setting
from pytest_megatron.workloads.training.plan.trace_settings import VARIABLE as TRACE_VARIABLE
from pytest_megatron.workloads.training.run.runner import run_attempt, start_here

_LOG = logging.getLogger("pytest_megatron.workloads")

CarryOut = Callable[[Submission, Planned, Lease], SubmissionOutcome]
_MOST_PROCESSES = 2  # each holds torch: a few hundred MB
_IMPORT_S = 300.0
_FORK_S = 60.0
_END_S = 1.0
_PACKAGE = str(Path(__file__).parents[3])
# -u, as torch.distributed.run starts ranks. The package may not be where ranks would find it.
_CODE = """
import sys
if not sys.flags.safe_path:
    del sys.path[0]
sys.path.insert(0, {path!r})
from pytest_megatron.workloads.engine.warm_process import main
del sys.path[0]
main({descriptor}, {controller}, {names!r})
"""
# Set by launchers: programs that can do without one set them for themselves.
_HARMLESS = frozenset(
    ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
)
_CHANGES = frozenset(("update", "setdefault", "pop", "popitem", "clear"))
# Tools and settings that concern a program from its first import on.
_WATCHED = (
    *("COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG", "PYTHONINSPECT", "PYTHONVERBOSE"),
    *("PYTHONPROFILEIMPORTTIME", "PYTHONTRACEMALLOC", "PYTHONWARNINGS"),
)
# Nothing reads them but the program, and Transformer Engine, which the program itself imports.
_FREE_NAMES = frozenset(
    (
        *("REPEAT", "RUN_NUMBER", "CHECKPOINT_LOAD_PATH", "DATA_PATH", "DATA_CACHE_PATH"),
        *("GPUS_PER_NODE", TRACE_VARIABLE),
    )
)
_FREE_PREFIX = "NVTE_"


class LeasingEngine:
    """Runs submissions within `poll`, in the order in which they came."""

    is_queue = False
    interval_s = 0.0

    def __init__(self, host: Host, carry_out: CarryOut) -> None:
        """Begin without submissions.

        Args:
            host: Whose GPUs are leased.
            carry_out: Runs a plan to its end while its GPUs are held.
        """
        self._host = host
        self._carry_out = carry_out
        self._waiting: list[Submission] = []

    def lacks(self, resources: Resources) -> str | None:
        """Return which GPUs are not there; nodes are on this machine, side by side."""
        return self._host.lacks(resources.platform, resources.num_nodes * resources.ranks_per_node)

    def submit(self, submissions: Sequence[Submission]) -> None:
        """Keep submissions until `poll`."""
        self._waiting += submissions

    def poll(self) -> Sequence[Update]:
        """Run the next submission to its end.

        Raises:
            LaunchError: It cannot be started, now or later.
            KeyboardInterrupt: Ctrl-C; everything of the attempt is gone by then.
        """
        if not self._waiting:
            return []
        submission = self._waiting.pop(0)
        return [
            Update(key=submission.key, phase=SubmissionPhase.ENDED, outcome=self._run(submission))
        ]

    def cancel(self, keys: Sequence[str]) -> None:
        """Forget submissions; none of them runs outside of `poll`."""
        self._waiting = [submission for submission in self._waiting if submission.key not in keys]

    def _run(self, submission: Submission) -> SubmissionOutcome:
        """Run a submission, on leased GPUs unless it is one for the CPU."""
        needed = submission.resources
        if needed.platform == CPU_PLATFORM:
            return self._carry_out(
                submission, submission.planned(None), Lease(gpus=(), descriptors=())
            )
        fitting = _trusted_first(self._host.fitting(needed.platform), submission.avoid_gpus)
        leased = lease_gpus(
            fitting, needed.num_gpus, lambda text: submission.listener.on_lines([text])
        )
        with contextlib.closing(leased) as lease, HealthWatch(lease.gpus) as watch:
            devices = tuple(gpu.uuid for gpu in lease.gpus)
            _LOG.info("%s: leased %s", submission.key, ", ".join(devices))
            outcome = self._carry_out(submission, submission.planned(devices), lease)
            return replace(outcome, health=watch.finish())


def _trusted_first(gpus: Sequence[Gpu], avoided: frozenset[str]) -> tuple[Gpu, ...]:
    """Return the GPUs with those last on which the hardware failed before."""
    return tuple(sorted(gpus, key=lambda gpu: gpu.uuid in avoided))


class LocalEngine(LeasingEngine):
    """Runs submissions as processes of this machine."""

    name = "local"

    def __init__(self, context: EngineContext) -> None:
        super().__init__(context.facts.host, self._run_plan)
        self._context = context
        self._warm = WarmProcesses()

    def settle(self, setting: Setting, _workload: Workload) -> Setting:
        """Return the setting as it is: the ranks have what the controller has."""
        return setting

    def close(self) -> None:
        """End the processes that have imported torch."""
        self._warm.close()

    def _run_plan(
        self, submission: Submission, planned: Planned, lease: Lease
    ) -> SubmissionOutcome:
        """Run a plan on the leased GPUs."""
        mode = self._context.workload_start
        forks = mode == "fork" or (mode == "auto" and submission.resources.platform == CPU_PLATFORM)
        how = "forked from a warm process" if forks else "fresh interpreters"
        _LOG.info("%s: ranks are %s (megatron_workload_start=%s)", submission.key, how, mode)

        def start(phase: PhasePlan, cwd: Path) -> GuardedProcess:
            """Start a phase, by a fork where that gives the same."""
            if phase.is_script or not forks:
                fresh = partial(execute_guard, kept_open=lease.descriptors)
                return start_here(phase, cwd, fresh)
            run_dir = self._context.run_dir
            forked = partial(self._warm.start_guard, phase, run_dir, lease.descriptors)
            return start_here(phase, cwd, forked)

        return SubmissionOutcome(
            ends=run_attempt(
                planned.plan, planned.description, submission.listener, start, submission.losses
            )
        )


LOCAL = LocalEngine.name


def open_engine(name: str, context: EngineContext) -> Engine:
    """Return the engine of that name.

    Raises:
        LaunchError: No package brings one of that name, it cannot be imported, or it refuses its
            configuration.
    """
    if name == LOCAL:
        return LocalEngine(context)
    found = {entry.name: entry for entry in importlib.metadata.entry_points(group=GROUP)}
    if name not in found:
        raise LaunchError(
            "--executor",
            f"unknown engine {name!r}, expected {one_of(name, {LOCAL, *found})}",
        )
    try:
        make: Callable[[EngineContext], Engine] = found[name].load()
    except (ImportError, AttributeError) as error:
        raise LaunchError(
            "--executor",
            f"the engine {name!r} cannot be loaded ({found[name].value}): {error}; "
            f"reinstall the package that brings it",
        ) from error
    return make(context)


class NotForkedError(Exception):
    """A phase is started by fresh interpreters; the text is the reason."""


@dataclass(slots=True)
class _Process:
    """A process that has imported torch."""

    connection: socket.socket
    process: subprocess.Popen[bytes]

    def close(self) -> None:
        """End the process; what it has forked goes on."""
        self.connection.close()
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:  # it was stopped, or still imports
            self.process.kill()
            self.process.wait()


@dataclass(frozen=True, slots=True)
class _ForkedGuard:
    """A guard that is not a child of this process."""

    pid: int
    end: int

    def wait(self) -> None:
        """Wait for the end of the guard."""
        select.select([self.end], [], [])
        os.close(self.end)


class WarmProcesses:
    """The processes of one session, by environment."""

    def __init__(self) -> None:
        self._processes: dict[str, _Process | str] = {}

    def close(self) -> None:
        """End all processes that have torch imported."""
        for process in self._processes.values():
            if isinstance(process, _Process):
                process.close()
        self._processes.clear()

    def start_guard(
        self, phase: PhasePlan, run_dir: Path, kept_open: Sequence[int], start: GuardStart
    ) -> Guard:
        """Fork the guard of a phase, or start a fresh one and write the reason into its log.

        Args:
            phase: The phase.
            run_dir: Below it lie the files of the run: variables that name one may differ.
            kept_open: Descriptors for `execute_guard`.
            start: Start of a fresh guard.

        Raises:
            OSError: The working directory is not usable.
            LaunchError: It is not known whether it was forked.
        """
        try:
            return self._fork_guard(phase, run_dir, kept_open, start)
        except NotForkedError as error:
            os.write(start.output[1], f"pytest-megatron: ranks are not forked: {error}\n".encode())
        return execute_guard(start, kept_open)

    def _fork_guard(
        self, phase: PhasePlan, run_dir: Path, kept_open: Sequence[int], start: GuardStart
    ) -> Guard:
        """Fork the guard of a phase.

        Raises:
            NotForkedError: It has to be started in another way.
            LaunchError: It is not known whether it was forked.
        """
        script = script_of(phase)
        if reason := obstacle_of(script, start.env):
            raise NotForkedError(reason)
        free = free_names(start.env, run_dir)
        env = {name: value for name, value in start.env.items() if name not in free}
        if phase.world_size > 1:
            env.setdefault("OMP_NUM_THREADS", "1")  # as torch.distributed.run sets it for ranks
        assert phase.start is not None
        names = [*PRELOADED, *imports_of(script)]
        process = self._process(phase.start.python, names, env, start.cwd)
        order = {"words": list(start.words), "env": dict(start.env), "free": free}
        with contextlib.ExitStack() as undo:
            undo.callback(process.close)
            try:
                send(
                    process.connection,
                    {**order, "cwd": str(start.cwd)},
                    [*start.output, *start.pipes, *kept_open],
                )
            except OSError:
                raise NotForkedError("the process that had imported torch has ended") from None
            message, _ = receive(process.connection)
            if message is None:  # it may have forked the guard already
                raise LaunchError(
                    f"process {process.process.pid}",
                    "the process that forks launchers was killed or stopped; run it again",
                )
            undo.pop_all()
        pid = cast("int", message["pid"])
        return _ForkedGuard(pid, os.pidfd_open(pid))

    def _process(
        self, python: str, names: Sequence[str], env: Mapping[str, str], cwd: Path
    ) -> _Process:
        """Return the process of an environment, which may be new.

        Raises:
            NotForkedError: There is none.
        """
        key = json.dumps([python, list(names), sorted(env.items()), str(cwd)])
        found = self._processes.pop(key, None)
        if isinstance(found, _Process) and found.process.poll() is not None:
            found = None
        if found is None:
            living = [k for k, p in self._processes.items() if isinstance(p, _Process)]
            for old in living[: len(living) - _MOST_PROCESSES + 1]:
                cast("_Process", self._processes.pop(old)).close()
            found = _start_process(python, names, env, cwd)
        self._processes[key] = found  # the latest is the last
        if isinstance(found, str):
            raise NotForkedError(found)
        return found


def _start_process(
    python: str, names: Sequence[str], env: Mapping[str, str], cwd: Path
) -> _Process | str:
    """Start a process and wait until it has imported torch; return why it must not be forked."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:  # before Linux 5.3
        return f"the kernel has no pidfd_open ({error.strerror})"
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    code = _CODE.format(
        path=_PACKAGE, descriptor=theirs.fileno(), controller=os.getpid(), names=list(names)
    )
    with theirs:
        process = subprocess.Popen(
            [python, "-u", "-c", code],
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    started = _Process(ours, process)
    with contextlib.ExitStack() as undo:
        undo.callback(started.close)
        if not select.select([ours], [], [], _IMPORT_S)[0]:
            return f"torch was not imported in {_IMPORT_S:g} s"
        message, _ = receive(ours)
        if message is None:
            return f"the process that imports torch ended with exit code {process.wait()}"
        if problem := message["problem"]:
            return str(problem)
        ours.settimeout(_FORK_S)
        undo.pop_all()
    return started


def script_of(phase: PhasePlan) -> Path:
    """Return the script that the ranks of a phase run.

    Raises:
        NotForkedError: Ranks are not started by torch.distributed.run alone, from a script.
    """
    if phase.start is None or phase.start.ranks.starter is not Launcher.TORCHRUN:
        raise NotForkedError("torch.distributed.run does not start it")
    if not phase.start.ranks.is_alone:
        raise NotForkedError("it has several nodes")
    if phase.start.script is None:
        raise NotForkedError("it is no Python script")
    return Path(phase.start.script)


def free_names(env: Mapping[str, str], run_dir: Path) -> list[str]:
    """Return the variables that may differ from what torch was imported with."""
    return [
        name
        for name, value in env.items()
        if name in _FREE_NAMES or name.startswith(_FREE_PREFIX) or str(run_dir) in value
    ]


def obstacle_of(script: Path, env: Mapping[str, str]) -> str:
    """Return why a program would notice that torch was imported before it began, or ""."""
    watched = next((name for name in _WATCHED if name in env), None)
    return f"{watched} is set" if watched else _examine(script)[0]


def imports_of(script: Path) -> Sequence[str]:
    """Return the parts of torch that a program imports late, through what it uses."""
    return _examine(script)[1]


@functools.cache
def _examine(script: Path) -> tuple[str, Sequence[str]]:
    """Return where a program changes its environment, or "", and what it imports late."""
    imported: set[str] = set()
    has_optimizer = False
    try:
        for path, tree in _own_modules(script):
            if (line := _changed_environment(tree)) is not None:
                return f"{path.name}:{line} changes the environment, maybe for torch", ()
            names = set(_imported_names(tree))
            imported |= {name.partition(".")[0] for name in names}
            attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
            has_optimizer |= any("torch.optim" in n for n in names) or "optim" in attributes
    except (OSError, SyntaxError, ValueError) as error:
        return f"it cannot be read: {error}", ()
    if "megatron" in imported:
        return "", PRELOADED_FOR_MEGATRON
    return "", PRELOADED_FOR_OPTIMIZERS if has_optimizer else ()


def _own_modules(script: Path) -> Iterator[tuple[Path, ast.Module]]:
    """Yield the files of a program: the script, and what it imports from beside it."""
    directory = script.resolve().parent
    todo, seen = [script.resolve()], {script.resolve()}
    while todo:
        path = todo.pop()
        tree = ast.parse(path.read_bytes(), str(path))
        yield path, tree
        for name in _imported_names(tree):
            parts = name.split(".")
            for length in range(1, len(parts) + 1):
                base = directory.joinpath(*parts[:length])
                for file in (base.with_suffix(".py"), base / "__init__.py"):
                    if file not in seen and file.is_file():
                        seen.add(file)
                        todo.append(file)


def _imported_names(tree: ast.Module) -> Iterator[str]:
    """Yield the dotted names that a file imports: `a.b` of `import a.b` and of `from a import b`.

    So the last part of a name may be no module. Relative imports are left out.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _changed_environment(tree: ast.Module) -> int | None:
    """Return the first line that may change a variable that a library could read."""
    for node in ast.walk(tree):
        match node:
            case ast.Subscript(
                value=ast.Attribute(attr="environ") | ast.Name(id="environ"),
                ctx=ast.Store() | ast.Del(),
                slice=key,
            ):
                pass
            case ast.Call(
                func=ast.Attribute(
                    value=ast.Attribute(attr="environ") | ast.Name(id="environ"), attr=called
                ),
                args=args,
            ) if called in _CHANGES:
                key = args[0] if args else ast.Constant(None)
            case ast.Call(func=ast.Attribute(attr="putenv" | "unsetenv")):
                return node.lineno
            case _:
                continue
        if not (isinstance(key, ast.Constant) and key.value in _HARMLESS):
            return node.lineno
    return None

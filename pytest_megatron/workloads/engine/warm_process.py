"""Process that imports torch once; launchers and ranks of trainings are forked from it.

It has neither threads nor a CUDA context, and imports no code of the user. For each order of the
controller it forks a guard, from which a launcher is forked, from which a process is forked that
forks the ranks: all of them from a state in which nothing but imports has happened. What a forked
process is to do begins at the bottom of its stack, and it ends as an interpreter ends.
"""

from __future__ import annotations

import builtins
import contextlib
import faulthandler
import gc
import importlib
import io
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import NoReturn, Protocol, TypeAlias, cast

from pytest_megatron.process import guard
from pytest_megatron.process.fork_safety import find_obstacle, reseed
from pytest_megatron.process.tree import die_with, fork

# Starts the ranks of torch.distributed.run; see `replace_popen`.
_STARTS_RANKS = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
_LAUNCHER = "torch.distributed.run"
# Names methods in its records: has `inspect` look through all modules for each frame, ten times.
_RENDEZVOUS = "torch.distributed.elastic.rendezvous.dynamic_rendezvous"
_NAMES_METHOD = "get_method_name"
# Parts of torch, and what they import. Neither megatron-core nor its plugins are among them: a
# program may have to change torch before it imports these.
PRELOADED = ("torch", "torch.distributed.launcher.api", _STARTS_RANKS)
PRELOADED_FOR_OPTIMIZERS = ("torch._dynamo",)  # torch.optim imports it for the first optimizer
PRELOADED_FOR_MEGATRON = (
    "torch.distributed.tensor",
    "torch.distributed.checkpoint",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.utils.tensorboard",
)
# Set for each rank by torch.distributed.run; no library reads them when it is imported.
_OF_RANKS = frozenset(
    (
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
        *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
        *("MASTER_ADDR", "MASTER_PORT", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
    )
)
_OF_LAUNCHER = "TORCHELASTIC_"
_MOST_DESCRIPTORS = 64
_RESET = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD)
# Sent to everything below a guard to have stacks printed, or to the launcher's group.
_NOT_FOR_FORKER = (signal.SIGABRT, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
Message: TypeAlias = dict[str, object]


class _Popen(Protocol):
    """`subprocess.Popen`, with whatever a release of torch calls it with."""

    def __call__(self, args: Sequence[str], **others: object) -> subprocess.Popen[bytes]: ...


_POPEN = cast("_Popen", subprocess.Popen)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkOrder:
    """Order to fork a guard with a command of its own.

    Attributes:
        words: Arguments of the guard: its own, and the command.
        env: The environment.
        free: Names in it that may differ from what this process has imported torch with.
        cwd: Working directory.
    """

    words: Sequence[str]
    env: Mapping[str, str]
    free: Sequence[str]
    cwd: str


@dataclass(frozen=True, slots=True)
class Imports:
    """The environment at the imports of this process, and what they have set in it."""

    env: Mapping[str, str]
    added: Mapping[str, str]


def _order_of(message: Message) -> ForkOrder:
    """Return the request to fork a training, from a message."""
    words, free = (cast("list[str]", message[name]) for name in ("words", "free"))
    env, cwd = cast("dict[str, str]", message["env"]), str(message["cwd"])
    return ForkOrder(words=words, env=env, free=free, cwd=cwd)


class _BecomeError(BaseException):
    """Unwinds the stack of a forked process to its bottom."""

    def __init__(self, role: Callable[[], None]) -> None:
        super().__init__()
        self.role = role


def main(descriptor: int, controller: int, names: Sequence[str]) -> None:
    """Import modules, then fork until the controller closes the connection.

    Args:
        descriptor: Descriptor of the connection.
        controller: Process at whose end this one ends.
        names: What to import; one that is missing is left out.
    """
    die_with(controller)
    connection = socket.socket(fileno=descriptor)
    role: Callable[[], None] = partial(_serve, connection, names)
    while True:
        try:
            role()
        except _BecomeError as become:
            role = become.role
        else:
            return


def _serve(connection: socket.socket, names: Sequence[str]) -> None:
    """Import modules, then fork guards of trainings until the session ends."""
    imported = dict(os.environ)
    gc.disable()  # searches for garbage take an eighth of the imports, and find none
    problem = _import(names) or find_obstacle("torch was imported")
    gc.enable()
    added = {name: value for name, value in os.environ.items() if imported.get(name) != value}
    gc.collect()
    gc.freeze()  # keep present objects shared with what is forked
    send(connection, {"problem": problem})
    if not problem:
        _serve_forks(connection, partial(_guard, Imports(imported, added)), reports_ends=False)
    os._exit(0)


def _import(names: Sequence[str]) -> str:
    """Import modules; return why one cannot be imported, "" if all are."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in names:
            try:
                importlib.import_module(name)
            except ModuleNotFoundError as error:
                if name in PRELOADED:
                    return str(error)
            except Exception as error:  # noqa: BLE001 - ranks that import it report the error
                return f"{name} cannot be imported: {error}"
    if not replace_popen(dict(vars(sys.modules[_STARTS_RANKS])), _POPEN):
        return "this release of torch starts ranks in another way"
    return ""


def replace_popen(names: dict[str, object], start: object) -> bool:
    """Have a module start processes with `start`; return false if it does so in an unknown way."""
    if names.get("Popen") is subprocess.Popen:
        names["Popen"] = start
    elif names.get("subprocess") is subprocess:  # torch 2.6 to 2.8
        names["subprocess"] = types.SimpleNamespace(Popen=start)
    else:
        return False
    return True


def calling_function(depth: int = 2) -> str:
    """Return the name of the function whose frame is so far above."""
    return sys._getframe(depth).f_code.co_name


def _guard(imports: Imports, message: Message, kept: Sequence[int]) -> NoReturn:
    """Guard the launcher; `kept` are the pipes of the guard, and what it keeps open."""
    order = _order_of(message)
    os.chdir(order.cwd)
    set_environment(order.env)
    # The numbers of control and result are those of the controller.
    sys.argv[:] = ["guard", str(kept[0]), str(kept[1]), *order.words[2:]]
    free = frozenset(order.free)

    def start(command: Sequence[str]) -> int:
        """Fork the launcher of a training."""
        pid = _fork()
        if pid == 0:
            for number in kept:
                os.close(number)
            raise _BecomeError(partial(_launch, command, imports, free))
        return pid

    guard.main(start)
    os._exit(0)


def _launch(command: Sequence[str], imports: Imports, free: frozenset[str]) -> None:
    """Be `python -m torch.distributed.run ...`."""
    _reset_signals()
    launcher = os.getpid()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    forker = _fork()
    if forker == 0:
        ours.close()
        raise _BecomeError(partial(_fork_ranks, theirs, launcher))
    theirs.close()
    ranks = _RankForker(ours, imports, free)
    replace_popen(vars(sys.modules[_STARTS_RANKS]), ranks.start)
    if hasattr(sys.modules.get(_RENDEZVOUS), _NAMES_METHOD):
        vars(sys.modules[_RENDEZVOUS])[_NAMES_METHOD] = calling_function
    at = command.index("-m") + 2
    sys.orig_argv[:] = list(command)
    sys.argv[:] = [_LAUNCHER, *command[at:]]
    if not sys.flags.safe_path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        _as_program(lambda: runpy.run_module(_LAUNCHER, run_name="__main__", alter_sys=True))
    finally:
        ours.close()
        os.waitpid(forker, 0)  # nothing of ours may be left when the launcher has ended


class _RankForker:
    """The process that forks ranks, seen from the launcher."""

    def __init__(self, connection: socket.socket, imports: Imports, free: frozenset[str]) -> None:
        self._connection = connection
        self._imports = imports
        self._free = free
        self._ranks: dict[int, ForkedRank] = {}

    def start(
        self,
        args: Sequence[str],
        env: Mapping[str, str],
        stdout: io.IOBase | None,
        stderr: io.IOBase | None,
        **others: object,
    ) -> ForkedRank | subprocess.Popen[bytes]:
        """Start a rank: by a fork, or as a fresh interpreter where a fork would not be the same."""
        obstacle = self._obstacle(args, env)
        if others != {"start_new_session": True}:
            obstacle = f"this release of torch starts it with {', '.join(others)}"
        if obstacle:
            sys.stderr.write(f"pytest-megatron: rank {env.get('RANK')} is not forked: {obstacle}\n")
            return _POPEN(args, env=env, stdout=stdout, stderr=stderr, **others)
        files = [stream if stream is not None else n for n, stream in ((1, stdout), (2, stderr))]
        numbers = [file if isinstance(file, int) else file.fileno() for file in files]
        order: Message = {
            "args": list(args),
            "env": {**env, **self._imports.added},
            "cpus": sorted(os.sched_getaffinity(0)),  # torch may bind ranks by binding itself
        }
        send(self._connection, order, numbers)
        while True:
            message, _ = receive(self._connection)
            if message is None:
                raise OSError("the process that forks ranks has ended")
            pid = cast("int", message["pid"])
            if "status" not in message:
                self._ranks[pid] = ForkedRank(self, pid, args)
                return self._ranks[pid]
            self._end(message)

    def _obstacle(self, args: Sequence[str], env: Mapping[str, str]) -> str:
        """Return why a rank cannot be a fork, "" if it can."""
        script = script_in(args) if list(args[:2]) == [sys.executable, "-u"] else ""
        if not (script.endswith(".py") and Path(script).is_file()):
            return "it is no Python script"
        changed = {
            name
            for name in env.keys() | self._imports.env.keys()
            if env.get(name) != self._imports.env.get(name)
            and not name.startswith(_OF_LAUNCHER)
            and name not in _OF_RANKS | self._free
        }
        if changed:
            return f"torch was imported with another {', '.join(sorted(changed))}"
        if hidden := hidden_modules(Path(script)):
            return f"{hidden} beside it hides a library that is loaded"
        return ""

    def pump(self, timeout_s: float | None) -> None:
        """Take one message about the end of a rank, if it comes in time."""
        if not select.select([self._connection], [], [], timeout_s)[0]:
            return
        message, _ = receive(self._connection)
        if message is not None:
            self._end(message)
            return
        for rank in self._ranks.values():  # the forker was killed: nobody sees how they end
            if rank.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.pid, signal.SIGKILL)
                rank.returncode = -signal.SIGKILL

    def _end(self, message: Message) -> None:
        rank = self._ranks[cast("int", message["pid"])]
        rank.returncode = os.waitstatus_to_exitcode(cast("int", message["status"]))


@dataclass(slots=True)
class ForkedRank:
    """A rank as torch.distributed.run knows one: the part of `subprocess.Popen` that it uses."""

    forker: _RankForker
    pid: int
    args: Sequence[str]
    returncode: int | None = None
    stdin: None = field(default=None, init=False)
    stdout: None = field(default=None, init=False)
    stderr: None = field(default=None, init=False)

    def poll(self) -> int | None:
        """Return its exit code, or None while it runs."""
        if self.returncode is None:
            self.forker.pump(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the rank.

        Raises:
            subprocess.TimeoutExpired: It runs on.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0.0:
                assert timeout is not None
                raise subprocess.TimeoutExpired(list(self.args), timeout)
            self.forker.pump(left)
        return self.returncode

    def send_signal(self, sig: int) -> None:
        """Send a signal to the rank, if it runs."""
        if self.poll() is None:
            os.kill(self.pid, sig)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def _fork_ranks(connection: socket.socket, launcher: int) -> None:
    """Fork ranks for a launcher and report their ends."""
    die_with(launcher)
    signal.pthread_sigmask(signal.SIG_BLOCK, _NOT_FOR_FORKER)
    _serve_forks(connection, _train, reports_ends=True)


def _serve_forks(
    connection: socket.socket,
    role: Callable[[Message, Sequence[int]], None],
    *,
    reports_ends: bool,
) -> NoReturn:
    """Fork a process for each order that comes; exit once the connection closes.

    Args:
        connection: Brings orders with stdout, stderr, and further descriptors.
        role: What a forked process does with its order and the further descriptors.
        reports_ends: Whether the other side is told how they end.
    """
    ends: dict[int, int] = {}  # descriptor of a process -> the process
    while True:
        asked = connection.fileno()
        readable, _, _ = select.select([asked, *ends], [], [])
        for number in ends.keys() & set(readable):
            os.close(number)
            pid, status = os.waitpid(ends.pop(number), 0)
            with contextlib.suppress(BrokenPipeError):  # the end of the other side is seen below
                if reports_ends:
                    send(connection, {"pid": pid, "status": status})
        if asked not in readable:
            continue
        message, descriptors = receive(connection)
        if message is None:
            os._exit(0)  # nothing but imports is here to be torn down
        ready, ready_write = os.pipe()
        pid = _fork()
        if pid == 0:
            os.setsid()
            for target, number in enumerate(descriptors[:2], start=1):
                os.dup2(number, target)
            connection.close()
            for number in (*descriptors[:2], *ends, ready, ready_write):
                os.close(number)
            raise _BecomeError(partial(role, message, descriptors[2:]))
        os.close(ready_write)
        os.read(ready, 1)  # the end of file says that it leads a session and has its output
        for number in (*descriptors, ready):
            os.close(number)
        ends[os.pidfd_open(pid)] = pid
        send(connection, {"pid": pid})


def _train(message: Message, _: Sequence[int]) -> None:
    """Be a rank: `python -u SCRIPT ...`, or `python -u -m MODULE SCRIPT ...`."""
    set_environment(cast("dict[str, str]", message["env"]))
    if os.sched_getaffinity(0) != set(cpus := cast("list[int]", message["cpus"])):
        os.sched_setaffinity(0, cpus)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _NOT_FOR_FORKER)
    _reset_signals()
    reseed(has_user_code=False)
    command = cast("list[str]", message["args"])
    sys.orig_argv[:] = command
    if command[2] == "-m":
        sys.argv[:] = command[3:]
        if not sys.flags.safe_path:
            sys.path.insert(0, str(Path.cwd()))
        _as_program(lambda: runpy.run_module(command[3], run_name="__main__", alter_sys=True))
        return
    sys.argv[:] = command[2:]
    script, path = command[2], str(Path(command[2]).absolute())
    if not sys.flags.safe_path:
        sys.path.insert(0, str(Path(script).resolve().parent))
    module = types.ModuleType("__main__")
    module.__file__ = path
    module.__loader__ = SourceFileLoader("__main__", path)
    vars(module).update({"__builtins__": builtins, "__cached__": None})
    sys.modules["__main__"] = module

    def run() -> None:
        """Run the training program as `__main__`."""
        with io.open_code(path) as file:
            code = compile(file.read(), path, "exec")
        exec(code, vars(module))  # noqa: S102 - a program is run

    _as_program(run)


def script_in(args: Sequence[str]) -> str:
    """Return the script that a rank runs, by itself or by a module before it; "" without one."""
    at = 4 if "-m" in args[2:3] else 2
    return args[at] if at < len(args) else ""


def _as_program(run: Callable[[], object]) -> None:
    """Run a program to its end, which is that of the interpreter."""
    try:
        run()
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - as the interpreter at its top
        inner = error.__traceback__
        while inner is not None and inner.tb_frame.f_code.co_filename == __file__:
            inner = inner.tb_next
        sys.excepthook(type(error), error.with_traceback(inner), inner)
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        sys.exit(1)


def hidden_modules(script: Path) -> str:
    """Return a file beside a script that Python would have imported in place of a loaded module."""
    directory = script.resolve().parent
    for entry in os.scandir(directory):
        name = entry.name.removesuffix(".py")
        is_module = name != entry.name or Path(entry.path, "__init__.py").exists()
        if is_module and name in sys.modules and name != "__main__":
            return entry.name
    return ""


def set_environment(env: Mapping[str, str]) -> None:
    """Replace all variables of this process."""
    for name in set(os.environ) - set(env):
        del os.environ[name]
    os.environ.update(env)


def send(connection: socket.socket, message: Message, descriptors: Sequence[int] = ()) -> None:
    """Send a message of any length, with descriptors."""
    content = os.memfd_create("message")
    try:
        with os.fdopen(os.dup(content), "wb") as file:
            file.write(json.dumps(message).encode())
        socket.send_fds(connection, [b"m"], [content, *descriptors])
    finally:
        os.close(content)


def receive(connection: socket.socket) -> tuple[Message | None, list[int]]:
    """Return the next message and its descriptors; None if the connection closes or takes long."""
    try:
        text, descriptors, _, _ = socket.recv_fds(connection, 1, _MOST_DESCRIPTORS)
    except (ConnectionError, TimeoutError):
        return None, []
    if not text:
        return None, []
    with os.fdopen(descriptors[0], "rb") as file:
        file.seek(0)
        message: Message = json.loads(file.read())
    return message, descriptors[1:]


def _fork() -> int:
    """Fork, without the output that is still in buffers."""
    sys.stdout.flush()
    sys.stderr.flush()
    return fork()


def _reset_signals() -> None:
    """Set signals to what a fresh interpreter has."""
    for number in _RESET:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if faulthandler.is_enabled():
        faulthandler.enable()

"""Recorder of the code that a process runs and of the files that it opens (effects).

A window is a part of a session: one test, one fixture, one collected file, one import. Functions
are counted in the window that is open. Each process appends a line of JSON for a window to a file
of its own, which `changed.notes` reads. Imports the standard library alone, as programs that tests
start load it before anything else.

From Python 3.12 on `sys.monitoring` calls once for each function of the project and window; earlier
releases have a profiler in C, `cProfile`, which costs more.
"""

from __future__ import annotations

import functools
import importlib.machinery
import json
import os
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import TYPE_CHECKING, ClassVar, Protocol, cast

if TYPE_CHECKING:
    from cProfile import Profile

# No PYTEST_ in front, which trainings do not inherit.
NOTES = "MEGATRON_CHANGED_NOTES"  # directory of the files
KEY = "MEGATRON_CHANGED_WINDOW"  # the one that processes belong to
ROOT = "MEGATRON_CHANGED_ROOT"
_WORKER = "PYTEST_XDIST_WORKER"  # which such a process sets itself
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
HOOK = os.path.join(_PACKAGE, "changed", "site")
_IGNORED = ("/.git/", "/.pytest_megatron/", "/.pytest_cache/", "/__pycache__/", "/site-packages/")
_ELSEWHERE = frozenset(
    ("docker", "podman", "enroot", "kubectl", "sbatch", "srun", "salloc", "ssh", "env")
)
# Programs that read no file of a project; of others nobody knows which they read.
_BLIND = frozenset(
    (
        *("echo", "false", "free", "hostname", "id", "kill", "ldconfig", "lscpu", "nproc"),
        *("nvidia-smi", "ps", "rocm-smi", "sleep", "stty", "true", "tty", "uname", "whoami"),
    )
)
_BARE = frozenset(("-I", "-E", "-S"))  # options of Python that leave the recorder out
_GUARD = "/pytest_megatron/process/guard.py"
_REWRITER = "/_pytest/assertion/rewrite.py"
_MOST_HEAD = 512  # bytes of a script in which its interpreter is named
_LIBRARY = os.path.join(os.path.dirname(os.__file__), "")
_IMPORTERS = ("<frozen importlib", "<frozen zipimport")
_LINES = "/linecache.py"
_SITE = os.path.join(_LIBRARY, "site-packages", "")
_QUESTIONS = ("stat", "lstat", "access", "readlink")  # of `os`, which no audit hook sees
_HAS_MONITORING = sys.version_info >= (3, 12)


class _Functions(Protocol):
    """Source of the functions that ran."""

    def take(self) -> set[tuple[str, str]]:
        """Return file and qualified name of the functions that ran since the last call.

        Raises:
            RuntimeError: Another tool has taken the place of the recorder.
        """


def _free_tools(number: int) -> list[int]:
    """Return tools of `sys.monitoring` that nothing uses.

    Raises:
        RuntimeError: There are fewer.
    """
    monitoring = vars(sys)["monitoring"]
    free = [tool for tool in (3, 4, 0, 5) if monitoring.get_tool(tool) is None]
    if len(free) < number:
        raise RuntimeError(
            "too few tools of sys.monitoring are free, as a debugger or a profiler of this process "
            "has taken them; record without it"
        )
    return free[:number]


def _name_of(code: CodeType) -> tuple[str, str]:
    """Return file and qualified name; two files may have equal code, which is one in a set."""
    return code.co_filename, code.co_qualname


class _Monitoring:
    """Functions that ran, by `sys.monitoring`.

    One tool finds code; it is called once for each place, ever. Another is on for code of the
    project that has not run yet in this window.
    """

    def __init__(self, is_own: Callable[[str], bool]) -> None:
        self._seen: list[CodeType] = []
        monitoring = vars(sys)["monitoring"]
        start, resume = monitoring.events.PY_START, monitoring.events.PY_RESUME
        switch, note, never = monitoring.set_local_events, self._seen.append, monitoring.DISABLE
        finder, local = _free_tools(2)

        def find(code: CodeType, _: int) -> object:
            """Note code of the project that is seen for the first time."""
            if is_own(code.co_filename):
                note(code)
            return never

        def enter(code: CodeType, _: int) -> None:
            """Note a function that is entered, once until it is switched on again."""
            # Off before it is noted: another thread may take what is noted and switch it on again.
            switch(local, code, 0)
            note(code)

        for tool, call in ((finder, find), (local, enter)):
            monitoring.use_tool_id(tool, "pytest-megatron")
            monitoring.register_callback(tool, start, call)
            monitoring.register_callback(tool, resume, call)
        monitoring.set_events(finder, start | resume)
        self._switch_on = functools.partial(switch, local)
        self._events = start | resume

    def take(self) -> set[tuple[str, str]]:
        """Return the functions that ran since the last call, and watch them again."""
        names = set()
        while self._seen:
            code = self._seen.pop()
            names.add(_name_of(code))
            self._switch_on(code, self._events)
        return names


class _Profiling:
    """Code that ran, by `cProfile`: in the main thread, and in threads that start later."""

    def __init__(self, is_own: Callable[[str], bool]) -> None:
        from cProfile import Profile  # noqa: PLC0415 - most processes need none

        self._is_own = is_own
        self._make = Profile
        self._profilers: list[Profile] = []
        threading.setprofile(lambda *_: self._add())
        self._add()

    def _add(self) -> None:
        """Start a profiler in this thread."""
        profiler = self._make(subcalls=False, builtins=False)
        self._profilers.append(profiler)
        profiler.enable()

    def pause(self) -> None:
        self._profilers[0].disable()

    def resume(self) -> None:
        self._profilers[0].enable()

    def take(self) -> set[tuple[str, str]]:
        """Return the functions that ran since the last call, of all threads."""
        seen = {
            _name_of(entry.code)
            for profiler in self._profilers
            for entry in profiler.getstats()
            if not isinstance(entry.code, str) and self._is_own(entry.code.co_filename)
        }
        for profiler in self._profilers:
            profiler.clear()
        running: object = sys.getprofile()
        if running is not self._profilers[0]:
            self.resume()
            raise RuntimeError("it sets another profiler, which replaces the recorder")
        return seen


_KINDS = ("loaded", "opened", "listed", "asked")


class _Window:
    """The notes of one window."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.code: set[tuple[str, str]] = set()  # file and qualified name
        self.loaded: set[str] = set()
        self.opened: set[str] = set()
        self.listed: set[str] = set()
        self.asked: set[str] = set()  # for whether they are there
        self.problem = ""
        self.counts: list[tuple[int, int]] = []  # hits and misses of each cache, at the start


class Watch:
    """Recorder of this process."""

    def __init__(self, root: str, directory: str, key: str = "", *, has_windows: bool) -> None:
        """Start recording what this process uses.

        Args:
            root: The checkout.
            directory: Directory of the notes.
            key: Key of the outermost window.
            has_windows: Whether windows are opened; else a line is written for each thing seen, as
                a process may be killed.
        """
        self._root = os.path.join(os.path.abspath(root), "")
        self._starts = (self._root, os.path.join(os.path.realpath(root), ""))
        prefix = os.path.join(sys.prefix, "")
        self._outside = (prefix,) if prefix.startswith(self._starts) else ()  # a `.venv` in it
        self._directory = directory
        self._has_windows = has_windows
        self._was_worker = _WORKER in os.environ  # the process that started this one, if any
        self._windows = [_Window(key)]
        self._written: set[str] = set()  # files
        self._file = self._new_file()
        self._is_busy = False
        self._is_stopped = False
        self._noted: set[tuple[str, str, str]] = set()
        self._caches: list[functools._lru_cache_wrapper[object]] = []
        self._functions: _Functions | None = None
        if _HAS_MONITORING and not has_windows:
            try:
                self._functions = _Immediate(self._is_own, self._note_code)
            except RuntimeError as error:
                self.spoil(str(error))
        elif has_windows:
            self._functions = (_Monitoring if _HAS_MONITORING else _Profiling)(self._is_own)
            self._record_imports()
            self._pass_on(key)
        sys.addaudithook(self._audit)
        for name in _QUESTIONS:
            self._ask_through(name)
        self._resolve_opens()
        os.register_at_fork(after_in_child=self._after_fork)

    @property
    def _is_in_session(self) -> bool:
        """True while pytest itself is at work, in a process that opens windows or is going to."""
        is_new_worker = not self._was_worker and _WORKER in os.environ
        return len(self._windows) == 1 and (self._has_windows or is_new_worker)

    def _is_own(self, name: str) -> bool:
        """Return whether a file is one of the project."""
        if "/.." in name:  # as of a path of modules
            name = os.path.abspath(name)
        return (
            name.startswith(self._starts)
            and not name.startswith(self._outside)
            and not any(part in f"{name}/" for part in _IGNORED)
        )

    @contextmanager
    def window(self, key: str) -> Generator[Callable[[Mapping[str, object]], None]]:
        """Open a window; yield a function that adds facts to its line."""
        facts: dict[str, object] = {}
        self._settle()
        window = self._open(key)
        before = {name: os.environ.get(name) for name in (NOTES, KEY, ROOT, "PYTHONPATH")}
        self._pass_on(key)
        try:
            yield facts.update
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
            self._close(window, facts)

    def _open(self, key: str) -> _Window:
        """Begin a window, in which what runs counts for one test or fixture."""
        window = _Window(key)
        window.counts = [cache.cache_info()[:2] for cache in self._caches]
        self._windows.append(window)
        return window

    def _close(self, window: _Window, facts: Mapping[str, object]) -> None:
        """Write a window; an earlier one filled a cache that it used and did not fill."""
        self._settle()
        self._windows.remove(window)
        caches: dict[str, set[str]] = {"cached": set(), "filled": set()}
        counts = [*window.counts, *[(0, 0)] * len(self._caches)]
        for cache, before in zip(self._caches, counts, strict=False):
            code = cache.__wrapped__.__code__
            for kind, now, then in zip(caches, cache.cache_info(), before, strict=False):
                if now != then:  # less than before where it was cleared
                    caches[kind].add(f"{code.co_filename}::{code.co_qualname}")
        self._write(window, {**{kind: sorted(names) for kind, names in caches.items()}, **facts})

    def find_caches(self, module: ModuleType) -> None:
        """Remember the cached functions and methods of a module of the project."""
        if not self._is_own(getattr(module, "__file__", None) or ""):
            return
        own = [
            value
            for value in vars(module).values()
            if getattr(value, "__module__", "") == module.__name__
        ]
        values = [*own, *(v for kind in own if isinstance(kind, type) for v in vars(kind).values())]
        self._caches += [
            value
            for value in values
            if isinstance(value, functools._lru_cache_wrapper)
            and isinstance(value.__wrapped__, FunctionType)
        ]

    def _pass_on(self, key: str) -> None:
        """Have processes of this window record as well."""
        paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        os.environ["PYTHONPATH"] = os.pathsep.join([HOOK, *(p for p in paths if p != HOOK)])
        os.environ |= {NOTES: self._directory, KEY: key, ROOT: self._root}

    def _settle(self) -> None:
        """Add what ran to the window that is open."""
        if self._functions is None:
            return
        try:
            self._windows[-1].code |= self._functions.take()
        except RuntimeError as error:
            self.spoil(str(error))

    def spoil(self, problem: str) -> None:
        """Note why the open window's record is incomplete."""
        self._windows[-1].problem = self._windows[-1].problem or problem
        if not self._has_windows:
            self._append({"problem": problem})

    def note_loaded(self, names: Iterable[str]) -> None:
        """Note files that were loaded before: all of their code counts for the open window."""
        whole = sorted({name for name in names if self._is_own(name)})
        self._write_line({"key": self._windows[-1].key, "whole": whole})

    def begin(self) -> None:
        """Note that this process is recorded."""
        self._append({"code": {}})

    def note(self, line: Mapping[str, object]) -> None:
        """Write a line."""
        self._write_line(line)

    @contextmanager
    def paused(self) -> Generator[None]:
        """Note nothing for a while, in which the recorder's own side works."""
        self._is_busy = True
        profiling = self._functions if isinstance(self._functions, _Profiling) else None
        if profiling is not None:  # it would make that work several times slower
            profiling.pause()
        try:
            yield
        finally:
            self._is_busy = False
            if profiling is not None:
                profiling.resume()

    def end(self) -> None:
        """Stop recording, and write the outermost window."""
        self._settle()
        self._write(self._windows[0], {})

    def stop(self) -> None:
        """Note nothing more, as a recorder with windows takes over."""
        self._is_stopped = True
        if isinstance(self._functions, _Immediate):
            self._functions.stop()

    def _record_imports(self) -> None:
        """Give each import a window: its functions count for all who use the module."""
        loader = importlib.machinery.SourceFileLoader
        execute = loader.exec_module

        def exec_module(own: importlib.machinery.SourceFileLoader, module: ModuleType) -> None:
            """Load a module of the project, and note it for those that import it."""
            if not self._is_own(own.path):
                return execute(own, module)
            self._windows[-1].loaded.add(own.path)
            self._note_importer(own.path)
            with self._nested(f"import:{own.path}"):
                execute(own, module)
            self.find_caches(module)
            return None

        setattr(loader, "exec_module", exec_module)  # noqa: B010 - mypy refuses the assignment
        real = importlib.import_module

        @functools.wraps(real)
        def import_module(name: str, package: str | None = None) -> ModuleType:
            """Import a module by name, and note it for the test."""
            module = real(name, package)
            path = str(getattr(module, "__file__", None) or "")
            if self._is_own(path):  # it may have been loaded before
                self._windows[-1].loaded.add(path)
                self._note_importer(path)
            return module

        importlib.import_module = import_module

    def _note_importer(self, path: str, kind: str = "loaded") -> None:
        """Have a module count for all who import the one whose code imports it, however late.

        It is executed once, for the first who asks: by `import_module`, a module's `__getattr__` or
        a registry of plug-ins, which lists their package.
        """
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and not self._is_own(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is not None and not frame.f_code.co_filename.startswith(_PACKAGE):
            self._write_line({"key": f"import:{frame.f_code.co_filename}", kind: [path]})

    @contextmanager
    def _nested(self, key: str) -> Iterator[None]:
        """Open a window whose processes count for the one around it."""
        self._settle()
        window = self._open(key)
        try:
            yield
        finally:
            self._close(window, {})

    def _audit(self, event: str, args: tuple[object, ...]) -> None:
        """Note files that are opened, directories that are listed, processes that are started."""
        note = self._EVENTS.get(event)
        if note is None or self._is_busy or self._is_stopped:
            return
        self._is_busy = True
        try:
            note(self, args)
        except Exception as error:  # noqa: BLE001 - must not fail what the test does
            self.spoil(f"the recorder failed: {error!r}")
        finally:
            self._is_busy = False

    def _on_open(self, args: tuple[object, ...]) -> None:
        path, mode, flags = args
        self._note_opened(self._name(path), mode, flags)

    def _note_opened(self, name: str | None, mode: object, flags: object) -> None:
        """Note a file that was opened, and whether it was written."""
        is_code = name is not None and name.endswith(".py")
        if name is None or (is_code and self._is_in_session):  # imports are recorded elsewhere
            return
        is_written = any(c in str(mode or "") for c in "wxa+") or (
            isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR)
        )
        if is_written:
            self._written.add(name)
        elif name in self._written:
            return
        elif not _is_importing():
            self._add("opened", name)
        elif not is_code:  # an archive with modules, which are loaded once for all
            self._add_for_all(name)

    def _add_for_all(self, name: str) -> None:
        """Note a file that is loaded into this process: all tests may use it from now on."""
        if self._has_windows:
            self._write_line({"key": self._windows[0].key, "opened": [name]})
        else:
            self._append({"opened": [name]})

    def _on_load(self, args: tuple[object, ...]) -> None:
        """Note a library, by `ctypes`, or a module in C."""
        path = args[-1] if len(args) == 1 else args[1]
        name = self._name(path) if isinstance(path, str | bytes) and path else None
        if name is not None:
            self._add_for_all(name)

    def _on_database(self, args: tuple[object, ...]) -> None:
        """Note a database of SQLite that was opened."""
        path = args[0]
        if isinstance(path, str) and path.startswith("file:"):
            path = path.removeprefix("file:").partition("?")[0]
        if path not in ("", b"", ":memory:"):
            self._note_opened(self._name(path), "r", 0)

    def _ask_through(self, question: str) -> None:
        """Have a function of `os` note the files that it is asked about."""
        real = getattr(os, question)

        @functools.wraps(real)
        def asked(*args: object, **options: object) -> object:
            """Call the real function, and note which file was asked for."""
            is_there = False
            try:
                found = real(*args, **options)
                is_there = question == "stat"
            finally:
                if not (self._is_busy or self._is_stopped):
                    path = args[0] if args else options.get("path")
                    self._note_question(path, options, is_there=is_there)
            return found

        asked.__module__ = "os"  # where a pickle finds it
        _replace(question, real, asked)

    def _note_question(
        self, path: object, options: Mapping[str, object], *, is_there: bool
    ) -> None:
        """Note a path that was asked for, there or not."""
        self._is_busy = True
        try:
            name = self._name(path, options.get("dir_fd"))
            if name is None or name in self._written:
                return
            if self._is_in_session and not self._is_of_project():
                return
            self._add("asked", name)
            caller = sys._getframe(2).f_code.co_filename
            # Lines that `linecache` has read before are those of the file if it is still the same.
            if is_there and (not name.endswith(".py") or caller.endswith(_LINES)):
                self._add("opened", name)
        except (TypeError, ValueError):
            return  # no path, as the function itself says
        finally:
            self._is_busy = False

    def _resolve_opens(self) -> None:
        """Have `os.open` note files in an open directory, which its event does not name."""
        real = os.open

        @functools.wraps(real)
        def opened(*args: object, **options: object) -> object:
            """Open a file, and note one that is named relative to a descriptor."""
            if options.get("dir_fd") is not None and not (self._is_busy or self._is_stopped):
                self._is_busy = True
                try:
                    name = self._name(args[0], options["dir_fd"])
                    self._note_opened(name, "", args[1] if len(args) > 1 else 0)
                finally:
                    self._is_busy = False
            return real(*args, **options)  # type: ignore[arg-type]

        opened.__module__ = "os"
        _replace("open", real, opened)

    def _add(self, kind: str, name: str) -> None:
        """Note a file in the innermost window; without one it counts for all tests."""
        if self._has_windows:
            getattr(self._windows[-1], kind).add(name)
        else:
            self._append({kind: [name]})

    def _on_list(self, args: tuple[object, ...]) -> None:
        """Note a folder that was listed."""
        place = "." if args[0] is None else args[0]
        name = self._name("", place) if isinstance(place, int) else self._name(place)
        if name is None or _is_importing():
            return
        if self._is_in_session and not self._is_of_project():
            return
        self._add("listed", name)
        if os.path.exists(os.path.join(name, "__init__.py")):  # a registry of plug-ins
            self._note_importer(name, "listed")

    def _on_exec(self, args: tuple[object, ...]) -> None:
        """Note code of a file that is executed, such as a script."""
        code = args[0]
        if self._has_windows or not isinstance(code, CodeType) or code.co_filename == "<string>":
            return
        name = self._name(code.co_filename)
        if name is not None:
            self._append({"loaded" if _HAS_MONITORING else "whole": [name]})

    def _on_start(self, args: tuple[object, ...]) -> None:
        """Note a process that a test starts, and have it recorded if it can be."""
        if self._is_in_session and not self._is_of_project():
            return
        program, arguments, place, env = args
        words = [os.fsdecode(cast("str", word)) for word in cast("Sequence[object]", arguments)]
        variables = os.environ if env is None else cast("Mapping[object, object]", env)
        names = {
            os.fsdecode(cast("str", n)): os.fsdecode(cast("str", v)) for n, v in variables.items()
        }
        full = os.fsdecode(cast("str", program))
        start = os.path.basename(full)
        if start in _ELSEWHERE:
            self.spoil(f"it starts {start}, whose processes are not recorded")
        elif start not in _BLIND and (HOOK not in names.get("PYTHONPATH", "") or KEY not in names):
            self.spoil("it starts a process with other environment variables")
        elif start.startswith("python") and _is_bare(words):
            self.spoil("it starts an isolated Python, which is not recorded")
        else:
            self._note_program(full, words, os.fsdecode(cast("str", place or ".")))

    def _note_program(self, program: str, words: Sequence[str], place: str) -> None:
        """Note the files that a process is started with; nobody knows what it reads besides.

        A Python notes that itself.
        """
        caller = _caller()
        if caller.startswith(_PACKAGE) and not self._is_own(caller):
            return  # which asks for the commit
        start = os.path.basename(program)
        if start == "git" and words[1:2] == ["-C"]:
            place = os.path.join(place, words[2])
        for word in (program, *words):
            name = self._name(os.path.join(place, word)) if word else None
            if name is not None and os.path.isfile(name) and name not in self._written:
                self._add("asked", name)
                self._add("opened", name)
        is_ours = any(self._name(os.path.join(place, one)) for one in ("", "x"))
        is_named = any(start in word for word in words for start in self._starts)
        if (is_ours or is_named) and start not in _BLIND and not _is_python(program):
            self.spoil(f"it starts {start}, and nobody knows which files that reads")

    def _on_replace(self, args: tuple[object, ...]) -> None:
        """Note a program that replaces this process."""
        env = next((one for one in args if isinstance(one, Mapping)), None)
        words = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else []
        self._on_start((args[0], words, None, env))

    def _on_system(self, _: tuple[object, ...]) -> None:
        self._on_start(("sh", [], None, None))

    _EVENTS: ClassVar[dict[str, Callable[[Watch, tuple[object, ...]], None]]] = {
        "open": _on_open,
        "os.listdir": _on_list,
        "os.scandir": _on_list,
        "exec": _on_exec,
        "subprocess.Popen": _on_start,
        "os.exec": _on_replace,
        "os.posix_spawn": _on_replace,
        "os.system": _on_system,
        "ctypes.dlopen": _on_load,
        "import": _on_load,
        "sqlite3.connect": _on_database,
    }

    def _name(self, path: object, directory: object = None) -> str | None:
        """Return the full name of a file of the project, None for any other.

        Args:
            path: As a function of `os` takes it.
            directory: Number of an open directory that it is relative to.
        """
        if isinstance(path, int):
            return None
        name = os.fsdecode(cast("str", path))
        if isinstance(directory, int):
            name = os.path.join(_readlink(f"/proc/self/fd/{directory}"), name)
        if not name.startswith("/") or "//" in name or "/." in name:
            name = os.path.abspath(name)
        return name if self._is_own(name) or f"{name}/" in self._starts else None

    def _is_of_project(self) -> bool:
        """Return true if code of the project is at work, such as a hook of a `conftest.py`."""
        frame: FrameType | None = sys._getframe()
        while frame is not None and f"{os.sep}pluggy{os.sep}" not in frame.f_code.co_filename:
            name = frame.f_code.co_filename
            if self._is_own(name) and not name.startswith(_PACKAGE):
                return True
            frame = frame.f_back
        return False

    def _note_code(self, code: CodeType) -> None:
        self._append({"code": {code.co_filename: [code.co_qualname]}})

    def _append(self, line: Mapping[str, object]) -> None:
        """Write a thing at once, once for each window and process."""
        key = os.environ.get(KEY, "")
        fact = key, *next(iter((name, repr(value)) for name, value in line.items()))
        if fact not in self._noted:
            self._noted.add(fact)
            self._write_line({"key": key, **_rank(), **line})

    def _write(self, window: _Window, facts: Mapping[str, object]) -> None:
        """Write what a window noted, as a line of the process's file."""
        code: dict[str, list[str]] = {}
        for path, name in window.code:
            code.setdefault(path, []).append(name)
        line: dict[str, object] = {"key": window.key, "code": code, "problem": window.problem}
        line |= {name: sorted(getattr(window, name)) for name in _KINDS}
        self._write_line({**line, **facts})

    def _write_line(self, line: Mapping[str, object]) -> None:
        """Append a line to the file of this process."""
        was_busy, self._is_busy = self._is_busy, True
        try:
            file = os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                os.write(file, f"{json.dumps(line)}\n".encode())
            finally:
                os.close(file)
        except OSError:
            return  # the directory is gone, as the session has ended
        finally:
            self._is_busy = was_busy

    def _new_file(self) -> str:
        return os.path.join(self._directory, f"{os.getpid()}-{os.urandom(4).hex()}")

    def _after_fork(self) -> None:
        """Begin a file for the child; what it does counts for the test that forked it."""
        self._file = self._new_file()
        self._noted.clear()
        self._is_busy = False
        window = self._windows[-1]
        if self._has_windows and (not self._is_in_session or self._is_of_project()):
            self.spoil("it forks a process, which is not recorded")
            self._write_line({"key": window.key, "problem": window.problem})


class _Immediate:
    """Code that runs, reported at once and once for each process."""

    def __init__(self, is_own: Callable[[str], bool], note: Callable[[CodeType], None]) -> None:
        monitoring = vars(sys)["monitoring"]
        (tool,) = _free_tools(1)

        def start(code: CodeType, _: int) -> object:
            """Note code of the project that starts, once."""
            if is_own(code.co_filename):
                note(code)
            return monitoring.DISABLE

        self.stop: Callable[[], None] = functools.partial(monitoring.set_events, tool, 0)
        monitoring.use_tool_id(tool, "pytest-megatron")
        monitoring.register_callback(tool, monitoring.events.PY_START, start)
        monitoring.set_events(tool, monitoring.events.PY_START)
        os.register_at_fork(after_in_child=monitoring.restart_events)

    def take(self) -> set[tuple[str, str]]:
        return set()


def _rank() -> dict[str, object]:
    """Return the place of this process in its training, where it is a rank of one."""
    words = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if not all(word.isdecimal() for word in words):
        return {}
    return {"rank": int(words[0]), "world": int(words[1])}


def _is_bare(words: Sequence[str]) -> bool:
    """Return true if a Python starts without the recorder; our guard starts another."""
    is_guard = any(word.endswith(_GUARD) for word in words[:4])
    return not is_guard and not _BARE.isdisjoint(words[1:4])


_readlink = os.readlink


def _replace(name: str, real: object, wrapped: object) -> None:
    """Put a function in the place of one of `os`, also among those that can do more."""
    setattr(os, name, wrapped)
    for able in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
        if real in able:
            able.add(wrapped)  # type: ignore[arg-type]


@functools.cache
def _is_python(program: str) -> bool:
    """Return true for Python, and for a script that Python runs."""
    if os.path.basename(program).startswith("python"):
        return True
    import shutil  # noqa: PLC0415 - most processes need none

    found = program if os.path.dirname(program) else shutil.which(program)
    if found is None:
        return False
    try:
        with open(found, "rb") as file:
            head = file.read(_MOST_HEAD)
    except OSError:
        return False
    return head.startswith(b"#!") and b"python" in head


def _caller() -> str:
    """Return the file of the code that asks the library, or of the import system."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        is_importer = name.startswith(_IMPORTERS)
        is_library = name.startswith((_LIBRARY, "<frozen ")) and not name.startswith(_SITE)
        if is_importer or not (is_library or name == __file__):
            return name
        frame = frame.f_back
    return ""


def _is_importing() -> bool:
    """Return true if Python's import system asks, or pytest's, and no other code that it runs."""
    name = _caller()
    return name.startswith(_IMPORTERS) or name.endswith(_REWRITER)


_watches: list[Watch] = []  # of this process, where a program is recorded from its start


def start_from_environment() -> None:
    """Record a program that a test or the session started."""
    if all(name in os.environ for name in (NOTES, KEY, ROOT)):
        _watches.append(Watch(os.environ[ROOT], os.environ[NOTES], has_windows=False))
        _watches[0].begin()


def stop_from_environment() -> None:
    """Stop what `start_from_environment` began: this process opens windows."""
    for watch in _watches:
        watch.stop()

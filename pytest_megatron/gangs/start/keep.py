"""The session's side of `--keep-gangs`: runs in a kept process, or keeps one at its end."""

from __future__ import annotations

import builtins
import contextlib
import io
import itertools
import json
import os
import subprocess
import sys
import threading
import warnings
from importlib.machinery import PathFinder
from pathlib import Path

import pytest
from _pytest.outcomes import Exit

from pytest_megatron.errors import LaunchError
from pytest_megatron.gangs.start import kept as kept_processes
from pytest_megatron.gangs.start.environment import KEY, find_user_module
from pytest_megatron.gangs.start.kept import (
    KeptProcess,
    changed_variables,
    describe_environment,
    find_kept,
    inherited_descriptors,
    initial_env,
    make_request,
    record_path,
    run_elsewhere,
)
from pytest_megatron.process.fork_safety import HARMLESS_ENV
from pytest_megatron.process.tree import python_command
from pytest_megatron.session.options import ENDED_PLUGIN, chosen_ini, early_size

_MOST_DESCRIPTORS = 50
_CODE = """
import sys
if not sys.flags.safe_path: del sys.path[0]
from pytest_megatron.gangs.start.kept_process import main
main()
"""
# Programs of editors that call `pytest.main()` with arguments alone, and do nothing afterwards.
# Source: vscode-python, python_files/vscode_pytest/run_pytest_script.py.
_RUNNERS = (("vscode_pytest", "run_pytest_script.py"),)
PLUGIN_NAME = "megatron-keep"
_RECORDERS = "pytest_megatron.session.run_file"
_OWN_HOOKS = ("_pytest.", "pytest_megatron.")


class StartAnew(Exit):
    """Ends a session in a kept process in order; it is started again without one."""


class ExitPlugin:
    """Has `pytest.main()` return, once its session has run in a kept process."""

    def __init__(self, exit_code: int) -> None:
        self._exit_code = exit_code

    @pytest.hookimpl(tryfirst=True)
    def pytest_cmdline_main(self) -> int:
        """Return the exit code of the session."""
        return self._exit_code


class KeepPlugin:
    """Keeps a process after the session, unless something that the session did forbids it.

    Attributes:
        state: State of kept processes for the header, with the reason why none is used.
    """

    def __init__(self, minutes: float) -> None:
        """Record the environment of the session.

        Args:
            minutes: After so many without a session a kept process ends.
        """
        self._minutes = minutes
        self._env = dict(os.environ) if _is_runner() else initial_env()
        self._doubt = ""
        self._has_run_elsewhere = False
        self._import_hooks = _find_import_hooks()
        self.state = "none was kept yet"

    def pytest_report_header(self) -> str:
        """Return the state of kept processes."""
        return f"kept gangs: {self.state}"

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config) -> None:
        """Check what was imported."""
        self.check(config)

    def check(self, config: pytest.Config) -> None:
        """Look for what the user's code changed and a kept process does not have.

        A session in one ends, with the hooks of its end, and is started anew; after another one,
        none is kept.

        Raises:
            StartAnew: It ends.
        """
        session = kept_processes.session
        watch = config.stash[KEY].watch
        expected = {**self._env, **(watch.values if watch else {})}
        changed = changed_variables(expected, os.environ)
        if changed:
            self._doubt = f"{', '.join(changed)} is set while tests are collected"
        elif new := [h for h in _find_import_hooks() if h not in self._import_hooks]:
            self._doubt = f"{_name_of(new[0])} is a hook of imports"
        elif session is not None and (shadow := session.find_shadow()):
            self._doubt = f"{shadow} has the name of a loaded module"
        if self._doubt and session is not None:
            session.start_anew(self._doubt)
            _discard_output(config)
            raise StartAnew(self._doubt)

    def begin(self, early_config: pytest.Config) -> None:
        """Run the session in a kept process, if there is one that fits; it then ends this one.

        Raises:
            SystemExit: It did.
        """
        session = kept_processes.session
        if session is not None:
            self.state = "started in a process that had torch loaded"
            return
        try:
            self._record = record_path(early_config.rootpath)
            self._problem = self._record.with_suffix(".problem")
        except LaunchError as error:
            self.state = self._doubt = f"off, {error}"
            return
        path = _path_before(early_config) if _is_runner() else _base_path()
        self._environment = describe_environment(self._env, path)
        early_config.add_cleanup(lambda: self._keep(early_config))
        kept = find_kept(self._record)
        doubt = _why_not(early_config)
        if kept is None:
            if self._problem.exists():
                self.state = f"none could be kept, {self._problem.read_text()}"
        elif differences := kept.differences(self._environment):
            kept.stop()
            self.state = f"outdated, {', '.join(differences)} changed"
        elif doubt or not kept.address or kept.is_stopped:
            what = "its process is stopped" if kept.address else "its process still loads torch"
            self.state = f"not used, {doubt or what}"
        else:
            self._run_in(kept, early_config)

    def _run_in(self, kept: KeptProcess, early_config: pytest.Config) -> None:
        """Run this session in a kept process and exit; return if it has to run here."""
        main = sys.modules["__main__"].__spec__
        program, path = "pytest" if main is None else "python -m pytest", list[str]()
        if _is_runner():
            program, path = "pytest.main", _path_before(early_config)
        self._has_run_elsewhere = True
        arguments = early_config.invocation_params.args
        request = make_request(program, path, self._env, arguments)
        try:
            reason, has_begun = run_elsewhere(kept, request)
        except SystemExit:  # pluggy warns of it in hook wrappers, as pytest before 8.0 has them
            warnings.simplefilter("ignore")
            raise
        self.state, self._doubt = f"not used, {reason}", reason if has_begun else ""
        self._has_run_elsewhere = False

    def _keep(self, config: pytest.Config) -> None:
        """Start a process for the next session without waiting for it, or note the reason."""
        if self._doubt:
            with contextlib.suppress(OSError):
                self._problem.write_text(self._doubt)
        if self._doubt or self._has_run_elsewhere or find_kept(self._record) is not None:
            return
        settings = {
            "record": str(self._record),
            "project": str(config.rootpath),
            "environment": self._environment,
            "minutes": self._minutes,
            "leader": _leader(),
        }
        with contextlib.suppress(OSError):  # the next session starts anew
            process = subprocess.Popen(
                python_command(_CODE),
                env={**HARMLESS_ENV, **self._env},
                cwd=config.invocation_params.dir,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            process.returncode = 0  # it outlives this process
            assert process.stdin is not None
            with process.stdin:
                process.stdin.write(json.dumps(settings).encode())


_PLUGIN = pytest.StashKey[KeepPlugin]()


def keep_gangs_early(config: pytest.Config, minutes: float) -> None:
    """Run this session in a kept process while its plugins are loaded, and exit, if it can."""
    if not _is_runner():
        _begin(config, minutes)


def keep_gangs(early_config: pytest.Config, minutes: float) -> KeepPlugin | None:
    """Run this session in a kept process, or register the plugin that keeps one."""
    plugin = early_config.stash.get(_PLUGIN, None)
    try:
        plugin = plugin or _begin(early_config, minutes)
    except SystemExit as end:
        if not _is_runner():
            raise
        early_config.pluginmanager.register(ExitPlugin(int(str(end.code))), ENDED_PLUGIN)
        return None
    if plugin is not None:
        early_config.pluginmanager.register(plugin, PLUGIN_NAME)
    return plugin


def _begin(config: pytest.Config, minutes: float) -> KeepPlugin | None:
    """Run this session in a kept process and exit, or return the plugin that keeps one."""
    size, given = early_size(config), config.known_args_namespace
    is_xdist = getattr(given, "numprocesses", None) or getattr(given, "tx", None)
    if size is None or "PYTEST_XDIST_WORKER" in os.environ:
        return None
    plugin = config.stash[_PLUGIN] = KeepPlugin(minutes)
    if size[1] > 1 or is_xdist:
        plugin.state = "off, with --nnodes" if size[1] > 1 else "off, with pytest-xdist"
    else:
        plugin.begin(config)
    return plugin


def _why_not(early_config: pytest.Config) -> str:
    """Return the reason why a session cannot run in a kept process, or ""."""
    given, main = early_config.known_args_namespace, sys.modules["__main__"]
    is_typed = list(early_config.invocation_params.args) == sys.argv[1:]
    is_pytest = getattr(main.__spec__, "name", "") == "pytest.__main__" or Path(
        sys.argv[0]
    ).name in ("pytest", "py.test")
    tools = getattr(sys, "monitoring", None)
    has_tool = tools is not None and any(tools.get_tool(number) for number in range(6))
    num_inherited = len(list(inherited_descriptors()))
    user_module = find_user_module(early_config.rootpath)
    is_known = (is_typed and is_pytest) or _is_runner()
    streams = (sys.stdin, sys.stdout, sys.stderr)
    originals = (sys.__stdin__, sys.__stdout__, sys.__stderr__)
    reasons = {
        "pytest was called by another program": not is_known
        or bool(early_config.invocation_params.plugins),
        "--pdb": given.usepdb or given.trace,
        "megatron_gang_start=fresh": chosen_ini(early_config, "megatron_gang_start") == "fresh",
        "a debugger, profiler or measurement of coverage is active": has_tool
        or sys.gettrace() is not None
        or sys.getprofile() is not None,
        "a plugin has started threads": threading.active_count() > 1,
        "standard streams are closed or replaced": streams != originals
        or not all(isinstance(stream, io.TextIOWrapper) for stream in streams),
        f"{num_inherited} descriptors are inherited": num_inherited > _MOST_DESCRIPTORS,
        f"{user_module} is loaded by -p": bool(user_module),
    }
    return next((reason for reason, is_so in reasons.items() if is_so), "")


def _find_import_hooks() -> list[object]:
    """Return what decides about imports before `sys.path` does, without pytest's and our own."""
    finders = itertools.takewhile(lambda finder: finder is not PathFinder, sys.meta_path)
    hooks = [*finders, *sys.path_hooks, builtins.__import__]
    return [hook for hook in hooks if not _name_of(hook).startswith(_OWN_HOOKS)]


def _name_of(hook: object) -> str:
    named = hook if hasattr(hook, "__qualname__") else type(hook)
    return f"{named.__module__}.{getattr(named, '__qualname__', '')}"


def _discard_output(config: pytest.Config) -> None:
    """Show and record nothing more of a session that is started again."""
    manager = config.pluginmanager
    capture, reporter = map(manager.get_plugin, ("capturemanager", "terminalreporter"))
    if capture is not None:
        capture.suspend_global_capture(in_=True)
        capture.read_global_capture()
    if reporter is not None:
        reporter._tw._file = io.StringIO()
    for plugin in manager.get_plugins():
        if type(plugin).__module__ == _RECORDERS:
            manager.unregister(plugin)


def _is_runner() -> bool:
    """Return whether an editor's program runs this session."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    return "PYTEST_CURRENT_TEST" not in os.environ and Path(file or "").parts[-2:] in _RUNNERS


def _path_before(early_config: pytest.Config) -> list[str]:
    """Return `sys.path` before pytest added the folders of its ini option."""
    path = list(sys.path)
    for folder in map(str, early_config.getini("pythonpath")):
        if folder in path:
            path.remove(folder)
    return path


def _base_path() -> list[str]:
    return sys.path[0 if sys.flags.safe_path else 1 :]


def _leader() -> int:
    """Return the process whose end is that of the terminal; 0 without a terminal."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return 0
    return os.getsid(0)

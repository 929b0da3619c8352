"""A project whose sessions run with `--keep-gangs`, and a torch that costs nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import psutil
from gang_suite import wait_until

from pytest_megatron.gangs.start import kept

MARK = "KEPT_SUITE"
TORCH = """
    import os, pathlib
    with pathlib.Path(__file__).with_name("loads").open("a") as file:
        file.write("x")
    __version__ = "2.9"
    initial_seed = lambda: 1 << 60
    set_num_threads = lambda _: None

    class default_generator:
        manual_seed = lambda _: None
"""
WARM = "kept gangs: started in a process that had torch loaded"


@dataclass(frozen=True)
class Project:
    """A project, with a directory of records for itself.

    Attributes:
        has_plugins: Whether its sessions load those of the environment, which takes a while.
    """

    root: Path
    has_plugins: bool = False

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))

    def env(self, **more: str) -> dict[str, str]:
        out = ("PYTEST_", "COV_", "COVERAGE", "PYTHON")
        own = {k: v for k, v in os.environ.items() if not k.startswith(out)}
        runtime = self.root / "runtime"
        runtime.mkdir(exist_ok=True)
        stub = str(self.root / "stub")
        own |= {MARK: str(self.root), "XDG_RUNTIME_DIR": str(runtime), "PYTHONPATH": stub}
        if not self.has_plugins:
            own["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        return own | {"PYTHONDONTWRITEBYTECODE": "1"} | more

    def start(self, *args: str, directory: str = ".", **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "pytest", "-p", "megatron", "--ranks", "2", *args],
            cwd=self.root / directory,
            env=self.env(**env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *args: str, directory: str = ".", **env: str) -> tuple[int, str]:
        """Run pytest with --keep-gangs; return its exit code and output."""
        process = self.start("--keep-gangs", *args, directory=directory, **env)
        output, _ = process.communicate(timeout=60)
        return process.returncode, output

    def records(self) -> list[Path]:
        return [*self.root.glob("runtime/*/*.json")]

    def kept(self) -> kept.KeptProcess:
        """Wait for a kept process that has loaded everything."""
        found: list[kept.KeptProcess] = []

        def has_loaded() -> bool:
            found[:] = [k for path in self.records() if (k := kept.find_kept(path)) and k.address]
            return bool(found)

        try:
            wait_until(has_loaded, "a kept process")
        except AssertionError as error:
            problems = [path.read_text() for path in self.root.glob("runtime/*/*.problem")]
            raise AssertionError(f"{error}: {problems}, {self.others()}") from error
        return found[0]

    def others(self, *known: int) -> list[str]:
        """Return the command lines of processes of this project that are not known."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == str(self.root) and process.pid not in known:
                    found.append(" ".join(process.cmdline()))
            except psutil.Error:
                continue
        return found

    def command(self, *args: str) -> str:
        script = Path(sys.executable).with_name("pytest-megatron")
        done = subprocess.run(
            [script, *args],
            cwd=self.root,
            env=self.env(),
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout

    def end(self) -> None:
        """End its kept process, also one that has just started, and wait for the end of all."""

        def is_gone() -> bool:
            for path in self.records():
                found = kept.find_kept(path)
                if found is not None:
                    found.stop()
            return not self.others()

        wait_until(is_gone, "the end of all processes")

"""Writes the scripts that Slurm is given, one for each shape of job; submits nothing.

nemo-run fills our template in a child process (`nemo.py`).
"""

from __future__ import annotations

import getpass
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import cast

from pytest_megatron.base.files import write_text_atomically
from pytest_megatron.engines.config import SlurmConfig, UvSyncConfig
from pytest_megatron.engines.slurm.shape import Shape, ShapePaths, mounts_of, shape_of
from pytest_megatron.engines.slurm.submit import JobScript
from pytest_megatron.errors import LaunchError
from pytest_megatron.runs.redact import Redactor
from pytest_megatron.workloads.engine.api import Resources
from pytest_megatron.workloads.recipe.model import Workload
from pytest_megatron.workloads.training.plan.plan import Setting

_DRIVER = "pytest_megatron.engines.slurm.nemo"
_CHILD_LIMIT_S = 300.0  # an import from a slow shared file system takes a minute or two
_DIGEST_LENGTH = 12
# What makes nemo-run or its dependencies behave otherwise than in a shell of their own.
_NOT_INHERITED = ("PYTHONWARNINGS", "SLURM_PROCID", "NEMORUN_HOME")


def place_of(config: SlurmConfig, platform: str, root: Path) -> SlurmConfig:
    """Return the settings for one platform with everything filled in that a script needs.

    Raises:
        LaunchError: `uv sync` is asked for, and there is no `uv.lock`.
    """
    place = config.at(platform)
    sync = None if place.uv_sync is None else _filled(place.uv_sync, root)
    python = place.python
    if python is None and sync is not None:
        python = f"{sync.venv}/bin/python"
    if python is None:
        python = sys.executable if place.container is None else "python3"
    return replace(place, uv_sync=sync, python=python)


class ScriptWriter:
    """Writes the scripts of one run."""

    def __init__(self, config: SlurmConfig, paths: ShapePaths, engine_dir: Path) -> None:
        """Take what all scripts have in common; nothing is written yet."""
        self._config = config
        self._paths = paths
        self._dir = engine_dir

    def place(self, platform: str) -> SlurmConfig:
        """Return the settings for a platform.

        Raises:
            LaunchError: The settings cannot be used there, see `place_of`.
        """
        return place_of(self._config, platform, self._paths.root)

    def settle(self, setting: Setting, workload: Workload) -> Setting:
        """Return the setting with the jobs' interpreter, and their variables over ours."""
        place = self.place(workload.platform)
        assert place.python is not None
        has_ft = setting.has_ft_launcher or place.python != setting.python  # unknown there
        env = {**setting.env, **place.env}
        return replace(setting, python=place.python, env=env, has_ft_launcher=has_ft)

    def describe(self, needed: Resources) -> list[str]:
        """Return lines on a job for a person, without secrets: image, mounts, script.

        Raises:
            LaunchError: nemo-run is missing or cannot write it.
        """
        place = self.place(needed.platform)
        shape = shape_of(needed, place, self._paths)
        seen: list[str] = []
        if place.container is not None:
            mounts = (f"mount: {mount}" for mount in mounts_of(place, self._paths))
            seen = [f"image: {place.container.image}", *mounts]
        (text,) = make_scripts([shape])
        shown = Redactor.of(place.job_env).text(text)
        lines = [f"| {line}" for line in shown.splitlines()]
        return [*seen, "script:", *lines]

    def write(self, wanted: Collection[Resources]) -> dict[Resources, JobScript]:
        """Return a script for each; its only argument is a spec.

        Raises:
            LaunchError: nemo-run is missing or cannot write one, or there is no room.
        """
        places = {needed: self.place(needed.platform) for needed in wanted}
        shapes = {needed: shape_of(needed, place, self._paths) for needed, place in places.items()}
        found = {needed: self._dir / "scripts" / _name(shape) for needed, shape in shapes.items()}
        texts = make_scripts(list(shapes.values()))
        try:
            (self._dir / "scripts").mkdir(parents=True, exist_ok=True)
            self._paths.logs.mkdir(parents=True, exist_ok=True)
            for path, text in zip(found.values(), texts, strict=True):
                write_text_atomically(path, text)
        except OSError as error:
            where = str(error.filename or self._dir)
            raise LaunchError(
                where, f"{error.strerror}; give another --run-dir, or make room"
            ) from error
        return {
            needed: JobScript(
                path=found[needed],
                exclude=place.exclude,
                env=place.env,
                options={"mode": place.mode.value, "ports": place.ports},
            )
            for needed, place in places.items()
        }


def make_scripts(shapes: Sequence[Shape]) -> list[str]:
    """Return the text of a script for each shape.

    Raises:
        LaunchError: nemo-run is missing, cannot be imported, or cannot write one.
    """
    env = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
    with tempfile.TemporaryDirectory(prefix="pytest-megatron-") as scratch:
        request, answer = Path(scratch, "request.json"), Path(scratch, "answer.json")
        request.write_text(json.dumps([asdict(shape) for shape in shapes]), encoding="utf-8")
        try:
            done = subprocess.run(
                [sys.executable, "-m", _DRIVER, str(request), str(answer)],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=_CHILD_LIMIT_S,
                check=False,
                text=True,
                errors="replace",
            )
            said = done.stdout.strip().rpartition("\n")[2] or f"exit code {done.returncode}"
        except subprocess.TimeoutExpired:
            said = f"no answer in {_CHILD_LIMIT_S:.0f} s, is the file system of {sys.prefix} slow?"
        if not answer.is_file():
            raise LaunchError(
                "nemo-run",
                f"made no script: {said}; pip install 'pytest-megatron[cluster]' brings the "
                f"versions that are known to work",
            )
        return cast("list[str]", json.loads(answer.read_text(encoding="utf-8")))


def _name(shape: Shape) -> str:
    """Return the name of a shape's script, which another shape has never."""
    text = json.dumps(asdict(shape), sort_keys=True)
    return f"{shape.name}-{_digest(text.encode())}.sh"


def _filled(sync: UvSyncConfig, root: Path) -> UvSyncConfig:
    """Return the settings of `uv sync` with the placeholders in `venv` filled in."""
    try:
        lock = (root / "uv.lock").read_bytes()
    except OSError as error:
        raise LaunchError(
            str(root / "uv.lock"),
            f"{error.strerror}; uv_sync installs what this file says: run `uv lock` in the project",
        ) from error
    said = json.dumps([str(root), sync.args, sync.first])
    venv = sync.venv.replace("{digest}", _digest(lock + said.encode()))
    return replace(sync, venv=venv.replace("{user}", getpass.getuser()))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:_DIGEST_LENGTH]

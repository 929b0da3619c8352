"""A recipe's own script: what it runs in, so that it finds what it expects and harms nothing. Pure.

Megatron-LM's scripts are written for its container. Here such a script runs unchanged in a copy of
the project, with a home directory of its own, and with stand-ins for tools that the machine lacks.

Source: Megatron-LM tests/functional_tests/shell_test_utils, tests/test_utils/recipes, d98e8a64dd.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pytest_megatron.base.files import write_json_atomically
from pytest_megatron.base.project import read_git
from pytest_megatron.runs.layout import AttemptDirs
from pytest_megatron.workloads.golden.model import (
    Series,
    Value,
    generation_to_json,
    series_of,
    to_float32,
)
from pytest_megatron.workloads.golden.store import golden_path, metrics_to_json, read_golden
from pytest_megatron.workloads.recipe.case import case_path, golden_name
from pytest_megatron.workloads.recipe.model import Workload

TOOLS = Path(__file__).parents[1] / "tools"
_YQ_PLACE = "/usr/local/bin/yq"
_CODE = "/opt/megatron-lm"
_RELEASE_INTERVAL = 5  # of what the driver reads of a release
_DECIMALS = 5  # of what Megatron-LM reads from TensorBoard
_CHECKPOINTS = "/tmp/checkpoints"  # noqa: S108 - what a script calls it; it is replaced


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptMachine:
    """Tools and paths that a recipe's script expects and this machine has.

    Attributes:
        missing: Tools out of `yq`, `uv` and `envsubst` that have to be stood in for.
        has_yq_place: Whether there is a `/usr/local/bin/yq`.
        paths: Directories of the container to those that stand in for them here, the code's and
            the checkpoints' not among them.
    """

    missing: frozenset[str] = frozenset()
    has_yq_place: bool = True
    paths: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptFiles:
    """Files that a script needs beside itself.

    Attributes:
        project: Directory to copy.
        copy: Where the copy goes; the script runs in it.
        results: The directory of the run, which is not copied where it lies in the project.
        home: HOME of the script, made empty.
        checkpoints: Directory that shell scripts of the copy get in place of `/tmp/checkpoints`.
        texts: Path to content of small files; those in `bin` are made executable.
        golden: Where the row's golden may be, and where the script looks for it; None for a script
            that no row has.
        golden_interval: Distance of the steps that the driver compares; step 1 is one of them.
    """

    project: Path
    copy: Path
    results: Path
    home: Path
    checkpoints: Path
    texts: Mapping[Path, str]
    golden: tuple[Path, Path] | None = None
    golden_interval: int = 1


def redirected(script: str, dirs: AttemptDirs, machine: ScriptMachine) -> str:
    """Return a rendered script with the container's directories replaced by ours."""
    own = {_CODE: str(dirs.project_copy), _CHECKPOINTS: str(dirs.checkpoints)}
    for there, here in {**machine.paths, **own}.items():
        script = _with_path(script, there, here)
    return script


def _with_path(text: str, there: str, here: str) -> str:
    """Return a text with a path of the container replaced."""
    return re.sub(rf"{re.escape(there)}(?![\w-])", here.replace("\\", r"\\"), text)


def script_files(
    project: Path,
    workload: Workload,
    dirs: AttemptDirs,
    machine: ScriptMachine,
    python: str,
    *,
    is_release: bool,
) -> ScriptFiles:
    """Return the files that a script needs beside itself.

    Raises:
        ConfigError: The project's settings are wrong.
    """
    tools = {
        "yq": f"exec {shlex.quote(python)} -P {shlex.quote(str(TOOLS / 'yq.py'))}",
        "envsubst": f"exec {shlex.quote(python)} {shlex.quote(str(TOOLS / 'envsubst.py'))}",
        "uv": _UV,
    }
    texts = {dirs.bin / name: _program(f'{tools[name]} "$@"') for name in sorted(machine.missing)}
    texts |= {
        dirs.bin / name: _program(f'exec {shlex.quote(python)} "$@"')
        for name in ("python", "python3")
    }
    # Whoever clears GPUs with it ends the trainings of others.
    texts[dirs.bin / "fuser"] = _program('echo "fuser: not run here, GPUs are leased" >&2')
    texts[dirs.prelude] = _prelude(dirs, machine)
    case = case_path(dirs.project_copy, workload)
    name = golden_name(workload.environment, workload.platform)
    return ScriptFiles(
        project=project,
        copy=dirs.project_copy,
        results=dirs.root.parents[2],  # <run-dir>/<item>/repeat_<i>/attempt_<k>
        home=dirs.home,
        checkpoints=dirs.checkpoints,
        texts=texts,
        golden=(golden_path(project, workload), case.with_name(name)),
        golden_interval=_RELEASE_INTERVAL if is_release else 1,
    )


def script_env(env: Mapping[str, str], dirs: AttemptDirs, num_gpus: int) -> dict[str, str]:
    """Return the variables that a script gets from us.

    Args:
        env: The controller's; what a cache is found by stays with it.
        dirs: The attempt's.
        num_gpus: Ranks on a node.
    """
    real = Path(env.get("HOME", "/"))
    return {
        "BASH_ENV": str(dirs.prelude),
        "GPUS_PER_NODE": str(num_gpus),
        "HF_HOME": env.get("HF_HOME", str(real / ".cache" / "huggingface")),
        "HOME": str(dirs.home),
        "PATH": f"{dirs.bin}:{env.get('PATH', '')}",
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
        "XDG_CACHE_HOME": env.get("XDG_CACHE_HOME", str(real / ".cache")),
    }


# `uv run [options] COMMAND`: the environment is the one that pytest runs in.
_UV = """\
[ "${1:-}" = run ] || { echo "uv (stand-in): only 'uv run' is known here" >&2; exit 2; }
shift
while :; do
  case "${1:-}" in
    --no-sync|--frozen|--active|--isolated) shift ;;
    -*) echo "uv (stand-in): option $1 is not known here" >&2; exit 2 ;;
    *) break ;;
  esac
done
exec\
"""


_FREE_PORT = 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])'


def _program(text: str) -> str:
    return f"#!/bin/sh\n{text}\n"


def _prelude(dirs: AttemptDirs, machine: ScriptMachine) -> str:
    """Return what every bash of the script reads first (BASH_ENV).

    It replaces what a script's own helpers spell out: they are not ours to rewrite.
    """
    code = shlex.quote(str(dirs.project_copy))
    lines = [
        "# Read by every bash of this script; written by pytest-megatron.",
        "cd() {",
        '  case "${1:-}" in',
        f"    {_CODE}|{_CODE}/) builtin cd {code} ;;",
        '    *) builtin cd "$@" ;;',
        "  esac",
        "}",
        'if [ -z "${MASTER_PORT:-}" ]; then  # two trainings on one machine must not meet',
        f"  MASTER_PORT=$(python -c {shlex.quote(_FREE_PORT)})",
        "  export MASTER_PORT",
        "fi",
    ]
    if not machine.has_yq_place:
        lines.append(f'function {_YQ_PLACE} {{ yq "$@"; }}')
    return "\n".join(lines) + "\n"


_NEVER = frozenset((".git", ".pytest_megatron", "__pycache__"))
_YQ = "/usr/local/bin/yq"


def look_at_machine(env: Mapping[str, str]) -> ScriptMachine:
    """Return which of the expectations of Megatron-LM's scripts this machine meets.

    A `uv` counts only with an environment that is named for it, as in the container: it would
    make one in the copy of the project otherwise.
    """
    path = env.get("PATH")
    missing = set()
    if shutil.which("envsubst", path=path) is None:
        missing.add("envsubst")
    if not _is_yq(shutil.which("yq", path=path)):
        missing.add("yq")
    if shutil.which("uv", path=path) is None or "UV_PROJECT_ENVIRONMENT" not in env:
        missing.add("uv")
    paths = {"/opt/venv": sys.prefix} if not Path("/opt/venv").exists() else {}
    if "DATA_PATH" in env and not Path("/mnt/artifacts").exists():
        paths["/mnt/artifacts"] = env["DATA_PATH"]
    return ScriptMachine(
        missing=frozenset(missing),
        has_yq_place=_is_yq(_YQ),
        paths=paths,
    )


@functools.cache
def _is_yq(program: str | None) -> bool:
    """Return if a program is the yq of the drivers; another one of that name has other flags."""
    if program is None:
        return False
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    except OSError:
        return False
    return "mikefarah" in done.stdout


def lay_out_script(files: ScriptFiles) -> None:
    """Make what a script needs beside itself.

    Tracked and new files are copied. What git ignores (built extensions, data, environments) is
    linked, so that it is found and costs nothing; a project without git is copied whole.

    A golden that lies where only we look goes beside the case, in Megatron-LM's own form.

    Raises:
        GoldenError: The golden cannot be read.
        OSError: Something cannot be read or written.
    """
    files.home.mkdir(parents=True)
    for path, text in files.texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)
    files.copy.mkdir(parents=True)
    listed = _listed(files.project, "--cached", "--others", "--exclude-standard")
    if listed is None:
        shutil.copytree(
            files.project,
            files.copy,
            symlinks=True,
            dirs_exist_ok=True,
            ignore=lambda where, names: {n for n in names if _is_left_out(files, Path(where, n))},
        )
    for name in listed or ():
        if not _is_left_out(files, files.project / name):
            _copy(files.project / name, files.copy / name)
    _redirect_checkpoints(files)
    ignored = _listed(files.project, "--others", "--ignored", "--exclude-standard", "--directory")
    for name in ignored or ():
        target = files.copy / name
        if not _is_left_out(files, files.project / name) and not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(files.project / name)
    if files.golden is not None:
        _lay_out_golden(*files.golden, files.golden_interval)


def _redirect_checkpoints(files: ScriptFiles) -> None:
    """Give the shell scripts of the copy a directory of their own for `/tmp/checkpoints`."""
    for path in files.copy.rglob("*.sh"):
        if path.is_symlink():  # maybe of a file outside of the copy
            continue
        text = path.read_text(encoding="utf-8", errors="surrogateescape")
        if _CHECKPOINTS in text:  # which all scripts of a machine would share
            text = _with_path(text, _CHECKPOINTS, str(files.checkpoints))
            path.write_text(text, encoding="utf-8", errors="surrogateescape")


def _lay_out_golden(source: Path, target: Path, interval: int) -> None:
    """Write a golden in the form that Megatron-LM's own comparison reads, unless one is there.

    That one rounds what it measured, and may want it equal to the golden.
    """
    if target.exists() or not source.is_file():
        return
    golden = read_golden(source)
    made = golden.generation
    sampled = {name: series_of(_sampled(one, interval)) for name, one in golden.metrics.items()}
    content = metrics_to_json(sampled) if made is None else generation_to_json(made)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_json_atomically(target, content)


def _sampled(series: Series, interval: int) -> dict[int, Value]:
    """Return the values that Megatron-LM reads from TensorBoard, rounded as it does."""
    return {
        step: round(to_float32(value), _DECIMALS) if isinstance(value, float) else value
        for step, value in series.items()
        if step == 1 or not step % interval
    }


def _is_left_out(files: ScriptFiles, path: Path) -> bool:
    """Return if a script does not need a file of the project: git's, a cache, a result of ours."""
    is_result = path == files.results or files.results in path.parents
    return is_result or bool(_NEVER.intersection(path.relative_to(files.project).parts))


def _copy(source: Path, target: Path) -> None:
    """Copy a file, a link or a submodule."""
    if not source.exists() and not source.is_symlink():
        return  # tracked, and deleted
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir() and not source.is_symlink():  # a submodule
        shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
    else:
        shutil.copy2(source, target, follow_symlinks=False)


def _listed(project: Path, *flags: str) -> Iterator[str] | None:
    """Return what git lists, relative to the project; None without git."""
    listed = read_git(project, "ls-files", "-z", *flags)
    if listed is None:
        return None
    return (name.rstrip("/") for name in os.fsdecode(listed).split("\0") if name)

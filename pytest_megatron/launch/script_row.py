"""A recipe's own script: what it runs in, so that it finds what it expects and harms nothing. Pure.

Megatron-LM's scripts are written for its container. Here such a script runs unchanged in a copy of
the project, with a home directory of its own, and with stand-ins for tools that the machine lacks.

Source: Megatron-LM tests/functional_tests/shell_test_utils, tests/test_utils/recipes, d98e8a64dd.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pytest_megatron.launch.layout import AttemptDirs

TOOLS = Path(__file__).with_name("tools")
_YQ_PLACE = "/usr/local/bin/yq"
_CODE = "/opt/megatron-lm"
_CHECKPOINTS = "/tmp/checkpoints"  # noqa: S108 - what a script calls it; it is replaced


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptMachine:
    """What of a script's expectations this machine meets.

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
        home: Its HOME, made empty.
        texts: Path to content of small files; those in `bin` are made executable.
    """

    project: Path
    copy: Path
    results: Path
    home: Path
    texts: Mapping[Path, str]


def redirected(script: str, dirs: AttemptDirs, machine: ScriptMachine) -> str:
    """Return a rendered script with the container's directories replaced by ours."""
    own = {_CODE: str(dirs.project_copy), _CHECKPOINTS: str(dirs.checkpoints)}
    for there, here in {**machine.paths, **own}.items():
        script = re.sub(rf"{re.escape(there)}(?![\w-])", here.replace("\\", r"\\"), script)
    return script


def script_files(
    project: Path, dirs: AttemptDirs, machine: ScriptMachine, python: str
) -> ScriptFiles:
    """Return the files that a script needs beside itself."""
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
    return ScriptFiles(
        project=project,
        copy=dirs.project_copy,
        results=dirs.root.parents[2],  # <run-dir>/<item>/repeat_<i>/attempt_<k>
        home=dirs.home,
        texts=texts,
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

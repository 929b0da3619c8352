"""A recipe's own script: what bash runs it in, so that it harms nothing. Pure.

Megatron-LM's scripts are written for its container, and most of them delete the user's `.netrc`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from pytest_megatron.runs.layout import AttemptDirs
from pytest_megatron.workloads.recipe.driver_script import CODE
from pytest_megatron.workloads.recipe.megatron_row import container_paths, with_paths

PRELUDE = Path(__file__).parents[1] / "run" / "prelude.sh"
# Where Megatron-LM's driver saves and loads, whatever the recipe says.
SHARED_CHECKPOINTS = Path("/tmp/checkpoints")  # noqa: S108 - of a script; in its text it is replaced


def redirected(script: str, root: Path, dirs: AttemptDirs, env: Mapping[str, str]) -> str:
    """Return a rendered script with the container's directories replaced by ours."""
    own = {CODE: str(root), str(SHARED_CHECKPOINTS): str(dirs.checkpoints)}
    return with_paths(script, {**container_paths(env), **own})


def script_env(
    env: Mapping[str, str], dirs: AttemptDirs, python: str, num_gpus: int
) -> dict[str, str]:
    """Return the variables that a script gets from us.

    Args:
        env: The controller's; what a cache is found by stays with it.
        dirs: The attempt's.
        python: The interpreter, whose environment `python` and `uv run` mean.
        num_gpus: Ranks on a node.
    """
    real, tools = Path(env.get("HOME", "/")), Path(python).parent
    return {
        "BASH_ENV": str(PRELUDE),
        "GPUS_PER_NODE": str(num_gpus),
        "HF_HOME": env.get("HF_HOME", str(real / ".cache" / "huggingface")),
        "HOME": str(dirs.home),
        "PATH": os.pathsep.join((str(tools), env.get("PATH", ""))),
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
        "UV_PROJECT_ENVIRONMENT": env.get("UV_PROJECT_ENVIRONMENT", str(tools.parent)),
        "XDG_CACHE_HOME": env.get("XDG_CACHE_HOME", str(real / ".cache")),
    }

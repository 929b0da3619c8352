"""Environment of a run: commit, versions, hardware.

For `plan.json`, `run.json` and goldens. Asks git and the installed packages' metadata; imports none
of the packages.
"""

from __future__ import annotations

import datetime as dt
import fnmatch
import functools
import importlib.metadata
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Le

from pytest_megatron.base.project import read_git
from pytest_megatron.base.schema import matches
from pytest_megatron.base.text import listed
from pytest_megatron.gpu.host import CPU_PLATFORM, Host, this_host
from pytest_megatron.runs.tree import is_recipe, read_tree

_PACKAGES = (
    "pytest-megatron",
    "torch",
    "megatron-core",
    "transformer-engine",
    "nvidia-nccl-cu13",
    "nvidia-cudnn-cu13",
    "numpy",
    "pytest",
    "triton",
)
_IMAGE_VARIABLES = ("PYTEST_MEGATRON_IMAGE", "NVIDIA_PYTORCH_VERSION", "SLURM_CONTAINER_IMAGE")


@dataclass(frozen=True, kw_only=True)
class RecordedFacts:
    """Environment of a run or an attempt.

    Attributes:
        commit: Commit of the project's checkout; None outside of git.
        is_dirty: Whether files differ from that commit or new ones are not ignored; goldens do not
            count, since they come of the run.
        image: The container image, where the environment names one.
    """

    commit: Annotated[str, matches(r"^[0-9a-f]{7,64}$")] | None = None
    is_dirty: bool = False
    image: str | None = None
    python: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    driver: str | None = None
    gpus: tuple[str, ...] = ()
    cpu: str | None = None
    num_cpus: Annotated[int, Ge(0), Le(1 << 53)] | None = None


@dataclass(frozen=True, kw_only=True)
class SessionFacts(RecordedFacts):
    """The surroundings of a run: what its files have of them, and all of the host.

    Attributes:
        edited: Files that differ from the commit, of its whole repository.
        new: Files of the project that git neither has nor ignores.
    """

    host: Host
    python: str
    edited: tuple[str, ...] = ()
    new: tuple[str, ...] = ()

    @property
    def uncommitted(self) -> tuple[str, ...]:
        """What the commit does not name of the program that a golden is measured with.

        New recipes are committed with their goldens.
        """
        new = (name for name in self.new if not is_recipe(name))
        return tuple(dict.fromkeys((*self.edited, *new)))

    def versions_on(self, platform_name: str) -> dict[str, str]:
        """Return the facts that decide how a workload of that platform rounds, and the others."""
        if platform_name != CPU_PLATFORM or not self.host.instructions:
            return dict(self.versions)
        return self.versions | {"cpu": self.host.instructions}

    def recorded(self) -> RecordedFacts:
        """Return what `run.json` and `plan.json` have."""
        return RecordedFacts(**{f.name: getattr(self, f.name) for f in fields(RecordedFacts)})


tree_at_start = functools.cache(read_tree)


@functools.cache
def gather_facts(root: Path) -> SessionFacts:
    """Ask git, the packages and the host; once per process."""
    host = this_host()
    tree = tree_at_start(root)
    return SessionFacts(
        commit=tree.commit,
        is_dirty=bool(tree.new) or not all(name.startswith("../") for name in tree.edited),
        edited=tuple(sorted(tree.edited)),
        new=tuple(sorted(tree.new)),
        image=next((os.environ[name] for name in _IMAGE_VARIABLES if name in os.environ), None),
        host=host,
        driver=host.driver,
        gpus=tuple(gpu.name for gpu in host.gpus),
        cpu=host.cpu,
        num_cpus=os.cpu_count(),
        python=platform.python_version(),
        versions={name: version for name in _PACKAGES if (version := _version(name))},
    )


def utc_now() -> str:
    """Return the time as `2026-01-31T12:00:00Z`."""
    return dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _version(package: str) -> str | None:
    """Return the installed version of a package, None without one."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


# Inherited variables that change what a training or a distributed test does.
_KEPT_PREFIXES = (
    *("CUBLAS_", "CUDA_", "GLOO_", "HF_", "LD_", "MASTER_", "MEGATRON_", "MKL_", "NCCL_", "NVTE_"),
    *("OMP_", "PYTHON", "PYTORCH_", "TORCH", "UCX_", "VIRTUAL_ENV", "WANDB_"),
)


def kept_variables(
    env: Mapping[str, str], own: Mapping[str, str] | None = None, names: Sequence[str] = ()
) -> dict[str, str]:
    """Return the variables that are worth keeping.

    Args:
        env: All.
        own: Those that we or the case set; all of them are kept.
        names: Patterns of names that the project wants kept.
    """
    own = own or {}
    return {
        name: value
        for name, value in env.items()
        if name in own
        or name == "PATH"
        or name.startswith(_KEPT_PREFIXES)
        or any(fnmatch.fnmatchcase(name, pattern) for pattern in names)
    }


MOST_BYTES = 1 << 20
NAME = "dirty.patch"
_MOST_NAMED = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """Changes of a tree beside its commit.

    Attributes:
        text: Text of the patch; empty where it was left out.
        problem: Why something was left out, or None.
    """

    text: str = ""
    problem: str | None = None


def make_patch(root: Path, new: Sequence[str]) -> Patch:
    """Return the changes below `root` since the commit; none if they exceed `MOST_BYTES`.

    Args:
        root: The project.
        new: Names of untracked files. Their contents are left out, as they may hold secrets; a file
            that was added with `git add` is in the patch.
    """
    scope = ("--", ".", ":(exclude)golden_values")
    git = ("-c", "core.quotepath=off", "diff", "--binary", "--relative", "HEAD")
    data = read_git(root, *git, *scope)
    if data is None:
        return Patch(problem="git could not say what differs")
    if len(data) > MOST_BYTES:
        return Patch(problem=f"of {len(data)} bytes, at most {MOST_BYTES} are kept; commit first")
    names = f"without the new {listed(new, _MOST_NAMED)}, which `git add` would put into it"
    return Patch(text=data.decode("utf-8", "replace"), problem=names if new else None)


def ci_page(env: Mapping[str, str]) -> str | None:
    """Return the page of the CI job that this runs in, as GitHub and GitLab name it."""
    if {"GITHUB_SERVER_URL", "GITHUB_REPOSITORY", "GITHUB_RUN_ID"} <= env.keys():
        repository = f"{env['GITHUB_SERVER_URL']}/{env['GITHUB_REPOSITORY']}"
        return f"{repository}/actions/runs/{env['GITHUB_RUN_ID']}"
    return env.get("CI_JOB_URL")

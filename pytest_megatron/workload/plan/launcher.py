"""The words that start ranks: LAUNCHER, program and nodes. Pure.

Source: torch.distributed.run; nvidia_resiliency_ext.fault_tolerance.launcher, a fork of it;
Megatron-LM tests/functional_tests/shell_test_utils/_run_training.sh, d98e8a64dd.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_megatron.errors import CaseError
from pytest_megatron.recipe.case import Launcher, WorkloadCase

FT_PACKAGE = "nvidia_resiliency_ext"
# For a machine without nvidia-resiliency-ext: nearly all of Megatron-LM's cases ask for it.
LAUNCHER_VARIABLE = "PYTEST_MEGATRON_LAUNCHER"
NODE_AGENTS = Path(__file__).parents[1] / "run" / "node_agents.py"
_NO_PYTHON = "--no-python"

_MODULES = {
    Launcher.TORCHRUN: "torch.distributed.run",
    Launcher.FT_LAUNCHER: f"{FT_PACKAGE}.fault_tolerance.launcher",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """What is started.

    Attributes:
        starter: What starts the ranks of a node.
        num_nodes: On this machine, unless an engine has several: each with an agent of its own.
        per_node: Ranks of a node.
        tee_ranks: Ranks over all nodes whose output is copied live; None is all of them.
        logs: Directory of their logs.
    """

    starter: Launcher
    num_nodes: int
    per_node: int
    tee_ranks: tuple[int, ...] | None
    logs: Path

    @property
    def world_size(self) -> int:
        """Ranks over all nodes."""
        return self.num_nodes * self.per_node

    @property
    def copied(self) -> str:
        """The ranks whose output is copied live, as `node_agents.py` takes them."""
        return "all" if self.tee_ranks is None else ",".join(map(str, self.tee_ranks))


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A program and its ranks, for whoever starts them in another way than `start_words`.

    Attributes:
        python: Interpreter of launcher and program.
        program: The program and its arguments, as torch.distributed.run takes them.
    """

    python: str
    ranks: Ranks
    program: tuple[str, ...]

    @property
    def rank_words(self) -> tuple[str, ...]:
        """What one rank runs, as torch.distributed.run would have it."""
        if self.program[0] == _NO_PYTHON:
            return self.program[1:]
        return (self.python, "-u", *self.program)

    @property
    def launcher_words(self) -> tuple[str, ...]:
        """What starts the ranks of a node; of several, `node_agents.node_command` fills in."""
        ranks = self.ranks
        own = (
            *("--max-restarts", "0", "--nproc-per-node", str(ranks.per_node)),
            *("--log-dir", str(_log_dir(ranks)), "--redirects", "3"),
        )
        launcher = (self.python, "-m", _MODULES[ranks.starter])
        if ranks.num_nodes == 1:
            return (*launcher, "--standalone", *own, *_tee_words(ranks), *self.program)
        return (*launcher, "--nnodes", str(ranks.num_nodes), *own, *self.program)


def starter_of(case: WorkloadCase, asked: str | None, *, has_ft_launcher: bool) -> Launcher:
    """Return what starts the ranks of a case.

    Args:
        case: Its LAUNCHER says what.
        asked: The value of `PYTEST_MEGATRON_LAUNCHER`, which wins; None without it.
        has_ft_launcher: Whether nvidia-resiliency-ext is installed.

    Raises:
        CaseError: `ft_launcher` is asked for and not installed, or the variable has another word.
    """
    words = [starter.value for starter in Launcher]
    if asked and asked not in words:
        raise CaseError(LAUNCHER_VARIABLE, f"is {asked!r}, expected one of {', '.join(words)}")
    starter = Launcher(asked) if asked else case.starter
    if starter is Launcher.FT_LAUNCHER and not has_ft_launcher:
        raise CaseError(
            str(case.path),
            f"LAUNCHER is 'ft_launcher' and {FT_PACKAGE} is not installed, nothing was run; "
            f"`pip install nvidia-resiliency-ext`, or set {LAUNCHER_VARIABLE}=torchrun to start "
            f"the same ranks with torch.distributed.run",
        )
    return starter


def started(python: str, ranks: Ranks, program: str, words: Sequence[str]) -> Started:
    """Return what is started.

    Args:
        python: Interpreter of launcher and program.
        ranks: How many, and where they log.
        program: `train.py`; or, where it does not end in `.py`, a command such as `nemo llm
            pretrain`, which is started as it is.
        words: The program's arguments.
    """
    command = shlex.split(program)
    is_python = command[0].endswith(".py")
    whole = (*(() if is_python else (_NO_PYTHON,)), *command, *words)
    return Started(python=python, ranks=ranks, program=whole)


def start_words(start: Started) -> tuple[str, ...]:
    """Return the command that starts all ranks here; none of them is ever started again.

    A rank that dies ends the run at once, whichever the launcher: a restart would hide it. Several
    nodes are as many launchers on this machine, under `node_agents.py`.
    """
    ranks = start.ranks
    if ranks.num_nodes == 1:
        return start.launcher_words
    sizes = (str(ranks.num_nodes), str(ranks.per_node), ranks.copied)
    return (start.python, "-I", str(NODE_AGENTS), *sizes, *start.launcher_words)


def _log_dir(ranks: Ranks) -> Path:
    """Return the directory for the launcher's logs; of several nodes, `node_agents.py` fills in."""
    return ranks.logs if ranks.num_nodes == 1 else ranks.logs / "node{node}"


def _tee_words(ranks: Ranks) -> list[str]:
    size = ranks.per_node
    chosen = range(size) if ranks.tee_ranks is None else [r for r in ranks.tee_ranks if r < size]
    words = ",".join(f"{rank}:3" for rank in chosen)
    return ["--tee", words] if words else []

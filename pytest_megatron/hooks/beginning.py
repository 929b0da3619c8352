"""What a session was before anything of the user's was imported; ranks begin from there as well.

Also holds the variables that stand while tests are collected. Imports nothing but pytest.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from pytest_megatron.hooks import options
from pytest_megatron.hooks.option_values import has_workers

if TYPE_CHECKING:
    from pytest_megatron.gang.bootstrap import RandomState
    from pytest_megatron.hooks.warm import PreloadedProcess
    from pytest_megatron.hooks.watch import Watch

PLUGIN_NAME = "megatron-beginning"


@dataclass(slots=True)
class Beginning:
    """Where a session began.

    Attributes:
        watch: None in a session without options for gangs.
        warm: The process that ranks which collect for themselves come from, once it is started.
    """

    env: Mapping[str, str]
    path: list[str]
    argv: list[str]
    random_state: RandomState
    watch: Watch | None = None
    warm: PreloadedProcess | None = None

    def stop_warm(self) -> None:
        """End what nobody has taken."""
        if self.warm is not None:
            self.warm.stop()


KEY = pytest.StashKey[Beginning]()


class BeginningPlugin:
    """Sets the variables of rank 0 while tests are collected."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    @pytest.hookimpl(trylast=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Put the variables back before pytest-xdist starts its workers: those collect."""
        config = session.config
        if has_workers(config) and not hasattr(config, "workerinput"):
            self._watch.stop()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtestloop(self) -> Generator[None, object, object]:
        """Put the variables back before any test runs."""
        self._watch.stop()
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self) -> Generator[None, object, object]:
        """Have them there again for hooks of a project that asks for them."""
        if self._watch.rank_readers:
            self._watch.start(is_noting=False)
        return (yield)


def note_beginning(early_config: pytest.Config) -> None:
    """Note how a session begins; where it asks for gangs, watch who asks for ranks."""
    beginning = Beginning(
        env=dict(os.environ),
        path=list(sys.path),
        argv=list(sys.argv),
        random_state=random.getstate(),
    )
    early_config.stash[KEY] = beginning
    size = options.early_size(early_config)
    if size is None:
        return
    from pytest_megatron.gang.bootstrap import HARMLESS_ENV, rank_env  # noqa: PLC0415 - not for all
    from pytest_megatron.gang.nodes import Nodes  # noqa: PLC0415 - not for all
    from pytest_megatron.hooks.warm import start_warm  # noqa: PLC0415 - not for all
    from pytest_megatron.hooks.watch import Watch  # noqa: PLC0415 - not for all

    def start_early() -> None:
        given = early_config.known_args_namespace
        is_needed = not (given.collectonly or _is_for_others(early_config))
        if is_needed and given.megatron_gang_start != "fresh":
            beginning.warm = start_warm("fork", beginning.env, beginning.path)
            early_config.add_cleanup(beginning.stop_warm)

    per_node, num_nodes = size
    world_size = per_node * num_nodes
    nodes = Nodes(num_nodes=num_nodes, ranks_per_node=per_node)
    env = rank_env(nodes.place(world_size)[0], world_size)
    harmless = {name: value for name, value in HARMLESS_ENV.items() if name not in os.environ}
    watch = beginning.watch = Watch({**env, **harmless}, start_early)
    watch.start()
    early_config.add_cleanup(watch.stop)
    early_config.pluginmanager.register(BeginningPlugin(watch), PLUGIN_NAME)


def refuse_launcher(config: pytest.Config, num_nodes: int) -> None:
    """Make sure that no launcher started this session several times: each would run everything.

    A test may start such a session by itself; what launched that test is none of its business.

    Raises:
        pytest.UsageError: One did.
    """
    env = config.stash[KEY].env
    if "PYTEST_CURRENT_TEST" in env:
        return
    started = num_started(env)
    if started is not None and started[1] > num_nodes:
        launcher, number = started
        raise pytest.UsageError(
            f"{launcher} started {number} sessions of pytest, and each of them would start ranks "
            f"and run everything; start pytest once, without {launcher}, or drop --ranks and --gpus"
        )


def num_started(env: Mapping[str, str]) -> tuple[str, int] | None:
    """Return what launched a process, and how often; None where nothing is known of a launcher.

    Slurm's numbers say nothing of it: the shell of `srun --ntasks=8 --pty` is one of 8 tasks, and
    the only one that goes on. Of a step over several nodes, see `gang.slurm_step`.
    """
    counts = [("mpirun", env.get("OMPI_COMM_WORLD_SIZE"))]
    if "TORCHELASTIC_RUN_ID" in env:
        counts.insert(0, ("torchrun", env.get("WORLD_SIZE")))
    found = ((name, int(count)) for name, count in counts if count and count.isdecimal())
    return next(found, None)


def _is_for_others(early_config: pytest.Config) -> bool:
    """Whether this process only hands tests to workers of pytest-xdist."""
    given = early_config.known_args_namespace
    is_xdist = bool(getattr(given, "numprocesses", None) or getattr(given, "tx", None))
    return is_xdist and "PYTEST_XDIST_WORKER" not in os.environ

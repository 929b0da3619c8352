"""Configurations of ranks: environment and directories."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from functools import cached_property
from pathlib import Path

import pytest

from pytest_megatron.base.files import JsonValue
from pytest_megatron.errors import LaunchError
from pytest_megatron.gangs.forkserver.store import LOCAL_HOST, check_local_host
from pytest_megatron.gangs.ipc.messages import RankConfig
from pytest_megatron.gangs.nodes.leader import DEVICES, address_of
from pytest_megatron.gangs.rank.bootstrap import rank_env
from pytest_megatron.gangs.rank.process import temp_factory
from pytest_megatron.gangs.topology import GangSpec, Nodes, share_gpus
from pytest_megatron.gpu.host import Lease
from pytest_megatron.process.tree import check_proc
from pytest_megatron.session.options import Options
from pytest_megatron.session.state import RunSession


class RankConfigs:
    """Creates configurations for the ranks of one session.

    Attributes:
        coverage: Settings of a running coverage.py, or empty.
        coverage_dir: Directory of data files of ranks.
    """

    def __init__(
        self,
        config: pytest.Config,
        run: RunSession,
        nodes: Nodes,
        coverage: dict[str, JsonValue],
    ) -> None:
        self._config = config
        self._run = run
        self._nodes = nodes
        self._ranks_per_gpu = run.options.ranks_per_gpu
        self.coverage = coverage
        self.coverage_dir = run.run_dir / run.ranks_dir / "coverage"

    def write(
        self, number: int, spec: GangSpec, lease: Lease | None, *, is_ahead: bool = False
    ) -> tuple[RankConfig, ...]:
        """Return the configurations of a gang, by rank.

        Args:
            number: Number of the gang; 0 for one that is not started yet.
            spec: Spec of the gang.
            lease: Devices on this node, if it has any.
            is_ahead: Whether it is not known yet that a gang will run: only ranks make directories.
        """
        run_dir = self._run.run_dir if is_ahead else self._run.open_run_dir()
        directory = run_dir / self._run.ranks_dir / f"attempt_{number}"
        places = self._nodes.place(spec.world_size)
        shares = spec.device == "cuda" and self._ranks_per_gpu > 1
        shown = share_gpus(spec.world_size, self._ranks_per_gpu) if shares else places
        if places[-1].node_rank > 0:
            host, _ = address_of(self._run.options.rdzv_endpoint)
        else:
            host = LOCAL_HOST
        common = {"MASTER_ADDR": host, "TORCHELASTIC_RUN_ID": self._run.run_dir.name}
        own = {}  # for this node: other nodes lease their own devices
        if lease is not None:
            own[DEVICES] = ",".join(gpu.uuid for gpu in lease.gpus)
        base_temp = self._base_temp() / f"gang{number}"
        return tuple(
            RankConfig(
                gang=number,
                rank=place.rank,
                world_size=spec.world_size,
                node_rank=place.node_rank,
                device=spec.device,
                env={
                    **common,
                    **(own if place.node_rank == 0 else {}),
                    **rank_env(shown[place.rank], spec.world_size),
                    **(_as_on_node(shown[place.rank].node_rank, directory) if shares else {}),
                    "TORCHELASTIC_ERROR_FILE": str(directory / str(place.rank) / "error.json"),
                },
                log_dir=str(directory / str(place.rank)),
                base_temp=str(base_temp / f"rank{place.rank}"),
                is_capturing=self._config.getoption("capture", "no") != "no",
                coverage=self.coverage,
                coverage_file=str(self.coverage_dir / f"{number}-{place.rank}"),
                finds_leaks=self._run.options.finds_leaks,
            )
            for place in places
        )

    def remove_ahead(self) -> None:
        """Remove the directories of ranks that collected for nothing, and those around them."""
        if not self._run.is_open:
            run_dir = self._run.run_dir
            shutil.rmtree(run_dir / self._run.ranks_dir, ignore_errors=True)
            made = () if self._run.options.run_dir else (run_dir, *run_dir.parents[:2])
            for directory in made:
                with contextlib.suppress(OSError):  # it has other files
                    directory.rmdir()

    def shared_dir(self, rank_configs: tuple[RankConfig, ...]) -> str:
        """Return a directory that ranks of all nodes of a gang can write to."""
        return self._dir_of_nodes if rank_configs[-1].node_rank > 0 else self._dir_of_node

    @cached_property  # read for each test
    def _dir_of_nodes(self) -> str:
        return str(self._run.run_dir.absolute() / "shared")

    @cached_property
    def _dir_of_node(self) -> str:
        return str(self._base_temp() / "shared")

    def _base_temp(self) -> Path:
        factory = temp_factory(self._config)
        return self._own_temp if factory is None else factory.getbasetemp()

    @cached_property
    def _own_temp(self) -> Path:
        """A temporary directory for sessions without pytest's plugin."""
        found = Path(tempfile.mkdtemp(prefix="pytest-megatron-"))
        self._config.add_cleanup(lambda: shutil.rmtree(found, ignore_errors=True))
        return found


def refuse_unfit_host(options: Options) -> None:
    """Make sure that processes of this host can be listed, and reach one another.

    Raises:
        pytest.UsageError: They cannot.
    """
    try:
        check_proc()
        if options.num_nodes == 1:  # several nodes use an endpoint
            check_local_host()
    except LaunchError as error:
        raise pytest.UsageError(str(error)) from None


def _as_on_node(node_rank: int, gang_dir: Path) -> dict[str, str]:
    """Return a host id for NCCL, which refuses two ranks of one host on one GPU."""
    return {"NCCL_HOSTID": f"{gang_dir}:{node_rank}"}

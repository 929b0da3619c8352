"""Fixtures of distributed tests. They also work under plain `torch.distributed.run -m pytest`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch

_RANK_PLUGIN = "megatron-rank"


class ModelParallel:
    """The function that `model_parallel` yields."""

    def __call__(
        self,
        *,
        tp: int = 1,
        pp: int = 1,
        cp: int = 1,
        ep: int = 1,
        etp: int | None = None,
        vpp: int | None = None,
        **settings: object,
    ) -> None:
        """Set the parallel state up."""
        from megatron.core import parallel_state

        if parallel_state.is_initialized():
            parallel_state.destroy_model_parallel()
        if etp is not None:
            settings["expert_tensor_parallel_size"] = etp
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=vpp,
            context_parallel_size=cp,
            expert_model_parallel_size=ep,
            **settings,
        )


@pytest.fixture(scope="session")
def rank() -> int:
    """Return the global index of this process, 0 to world_size - 1."""
    return int(os.environ.get("RANK", "0"))


@pytest.fixture(scope="session")
def local_rank() -> int:
    """Return the index of this process on its host."""
    return int(os.environ.get("LOCAL_RANK", "0"))


@pytest.fixture(scope="session")
def world_size() -> int:
    """Return the number of ranks over all hosts."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@pytest.fixture
def _megatron_world_size(request: pytest.FixtureRequest) -> int:
    """Return the parameter of a `world_size` marker with several numbers."""
    return int(request.param)


@pytest.fixture(scope="session")
def device(local_rank: int) -> torch.device:
    """Return this rank's device, made the current one if it is a GPU."""
    import torch  # only tests that ask for it load it

    from pytest_megatron.gangs.rank.bootstrap import device_of_rank  # noqa: PLC0415 - not for all

    # Not by `request`, which pytest creates for each test, even if the fixture is cached.
    kind = device_of_rank()
    if kind == "cpu" or (kind is None and not torch.cuda.is_available()):
        return torch.device("cpu")
    found = torch.device("cuda", local_rank)
    torch.cuda.set_device(found)
    return found


@pytest.fixture
def process_group(
    device: torch.device, rank: int, world_size: int
) -> torch.distributed.ProcessGroup:
    """Return the default process group: NCCL on GPUs, gloo elsewhere.

    It stays open for the next test of this gang, as setting it up takes longer than most tests.
    """
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        if "MASTER_PORT" in os.environ:
            dist.init_process_group(backend, rank=rank, world_size=world_size)
        else:
            store = torch.distributed.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
    group = dist.group.WORLD
    assert group is not None
    return group


@pytest.fixture
def shared_tmp_path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a directory that all ranks of this test share, empty at its start."""
    plugin = request.config.pluginmanager.get_plugin(_RANK_PLUGIN)
    if plugin is None:
        return tmp_path
    shared: Path = plugin.shared_dir
    shared.mkdir(parents=True, exist_ok=True)
    return shared


@pytest.fixture
def model_parallel(process_group: object) -> Generator[ModelParallel]:
    """Yield a function that sets megatron-core's parallel state up; afterwards it is destroyed.

    It takes the sizes `tp`, `pp`, `cp`, `ep`, `etp`, `vpp` (all 1, `vpp` None), and other
    arguments of megatron-core's `initialize_model_parallel`. Calling it again replaces the state.
    """
    del process_group  # only has to exist
    from megatron.core import parallel_state
    from torch.distributed import destroy_process_group, distributed_c10d

    before = list(distributed_c10d._world.pg_map)
    yield ModelParallel()
    with contextlib.suppress(AssertionError):
        parallel_state.destroy_model_parallel()
    # Which forgets its groups, and destroys none of them before megatron-core 0.19.
    for group in reversed(list(distributed_c10d._world.pg_map)):
        if group not in before:
            destroy_process_group(group)

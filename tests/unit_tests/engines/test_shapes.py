"""What an order and the settings make of a job, before anything becomes text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pytest_megatron.engines.config import (
    ContainerConfig,
    PlaceConfig,
    SlurmConfig,
)
from pytest_megatron.engines.slurm.shape import (
    ShapePaths,
    gpu_flags,
    minutes_of_job,
    shape_of,
)
from pytest_megatron.errors import LaunchError
from pytest_megatron.workloads.engine.api import Resources

PATHS = ShapePaths(root=Path("/p"), run_dir=Path("/r"), logs=Path("/r/logs"))
GPUS = Resources(
    platform="dgx_h100", num_nodes=2, gpus_per_node=8, ranks_per_node=8, time_limit_s=601
)
CPU = replace(GPUS, platform="cpu", gpus_per_node=0)


@pytest.mark.parametrize(
    ("needed", "place", "flags"),
    [
        (GPUS, SlurmConfig(), {"gpus-per-node": "8"}),
        (GPUS, SlurmConfig(gpus_per_node=4), {"gpus-per-node": "4"}),
        (GPUS, SlurmConfig(gpus_per_node=0), {}),
        (GPUS, SlurmConfig(gres="gpu:h100:{gpus}", gpus_per_node=4), {"gres": "gpu:h100:8"}),
        (CPU, SlurmConfig(), {}),
        (CPU, SlurmConfig(gres="gpu:{gpus}"), {}),
    ],
)
def test_gpus_are_asked_for_as_the_cluster_wants_it(
    needed: Resources, place: SlurmConfig, flags: dict[str, str]
) -> None:
    assert gpu_flags(needed, place) == flags


def test_slurm_ends_a_job_later_than_we_do() -> None:
    assert minutes_of_job(GPUS, SlurmConfig()) == 11 + 10
    assert minutes_of_job(GPUS, SlurmConfig(time_slack=0)) == 11
    own = SlurmConfig(python="p", sbatch_flags=("--time=1-2:30",))
    assert shape_of(GPUS, own, PATHS).flags["time"] == "1-2:30"


def test_orders_of_one_shape_have_one_script() -> None:
    place = SlurmConfig(python="python", platforms={"dgx_h100": PlaceConfig(partition="h100")})
    on_h100 = place.at("dgx_h100")
    assert shape_of(GPUS, on_h100, PATHS) == shape_of(
        replace(GPUS, time_limit_s=650), on_h100, PATHS
    )
    assert shape_of(GPUS, on_h100, PATHS) != shape_of(GPUS, place.at("dgx_h200"), PATHS)


def test_values_of_the_training_are_not_in_the_script() -> None:
    place = SlurmConfig(python="python", env={"TOKEN": "a secret"})
    assert "secret" not in repr(shape_of(GPUS, place, PATHS))


def test_a_path_that_enroot_would_cut_is_refused() -> None:
    place = SlurmConfig(python="p", container=ContainerConfig(image="i"))
    with pytest.raises(LaunchError, match=r"/my run: cannot be mounted into a container"):
        shape_of(GPUS, place, replace(PATHS, run_dir=Path("/my run")))

"""Lines that do an item again in the container of its run."""

from __future__ import annotations

import shlex

from pytest_megatron.repro.again import Again
from pytest_megatron.repro.command import container_lines


def test_a_line_for_a_container_is_quoted() -> None:
    name = "test_a.py::test_x[$(touch pwned) `id` ; '\"]"
    again = Again(argv=("py", "-m", "pytest", name), env={"OMP_SCHEDULE": "$(id)"})
    for line in container_lines("nvcr.io/nvidia/pytorch:25.03-py3", again, num_gpus=2):
        assert shlex.quote(name) in line
        assert shlex.split(line)[-1] == name


def test_the_image_of_a_run_is_started_by_docker_or_slurm() -> None:
    again = Again(argv=("py", "-m", "pytest", "t.py::a"), env={"NCCL_ALGO": "Ring"})
    inside = "python -m pytest t.py::a"
    docker = (
        "docker run --rm --ipc=host --ulimit memlock=-1 --gpus all -e NCCL_ALGO=Ring "
        '-v "$PWD:$PWD" -w "$PWD" nvcr.io/nvidia/pytorch:25.03-py3'
    )
    srun = (
        "srun --nodes=1 --ntasks=1 --gpus=8 '--container-image=nvcr.io#nvidia/pytorch:25.03-py3' "
        '--container-mounts="$PWD:$PWD" --container-workdir="$PWD" env NCCL_ALGO=Ring'
    )
    expected = [f"{docker} {inside}", f"{srun} {inside}"]
    assert container_lines("25.03", again, num_gpus=8) == expected

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from labs import SlurmLab

from pytest_megatron.doctor.facts import SystemView
from pytest_megatron.doctor.probes.machine import look_at_slurm

pytestmark = pytest.mark.nightly


def test_doctor_asks_a_real_controller(slurm_lab: SlurmLab) -> None:
    found = look_at_slurm(SystemView(python=Path(sys.executable), env=slurm_lab.env))
    names = {"sacct", "sbatch", "scancel", "scontrol", "sinfo", "squeue", "srun"}
    assert (found.problem, set(found.programs)) == (None, names)


def test_doctor_names_a_configuration_of_slurm_that_is_not_there(
    slurm_lab: SlurmLab, tmp_path: Path
) -> None:
    env = slurm_lab.env | {"SLURM_CONF": str(tmp_path / "slurm.conf")}
    found = look_at_slurm(SystemView(python=Path(sys.executable), env=env))
    assert found.problem == f"SLURM_CONF is {tmp_path}/slurm.conf, and there is no such file"

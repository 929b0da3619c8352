from __future__ import annotations

import sys
from pathlib import Path

import pytest
from labs import SlurmLab

from pytest_megatron.doctor.checks.machine import check_slurm
from pytest_megatron.doctor.facts import SystemView
from pytest_megatron.doctor.probes.machine import look_at_slurm

pytestmark = pytest.mark.nightly


def test_doctor_knows_a_client_whose_sacct_does_not_say_its_version(slurm_lab: SlurmLab) -> None:
    found = look_at_slurm(SystemView(python=Path(sys.executable), env=slurm_lab.env))
    version = slurm_lab.ask("sinfo", "--version").split()[1]
    names = ("sbatch", "scancel", "scontrol", "sinfo", "squeue", "srun")
    assert (found.problem, found.programs) == (
        None,
        {**dict.fromkeys(names, version), "sacct": "unknown"},
    )
    assert list(check_slurm(found)) == []


def test_doctor_names_a_configuration_of_slurm_that_is_not_there(
    slurm_lab: SlurmLab, tmp_path: Path
) -> None:
    env = slurm_lab.env | {"SLURM_CONF": str(tmp_path / "slurm.conf")}
    found = look_at_slurm(SystemView(python=Path(sys.executable), env=env))
    assert found.problem == f"SLURM_CONF is {tmp_path}/slurm.conf, and there is no such file"
    assert [hit.rule for hit in check_slurm(found)] == ["slurm-silent"]

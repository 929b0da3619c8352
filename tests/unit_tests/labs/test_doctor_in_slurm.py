from __future__ import annotations

import sys
from pathlib import Path

from labs import SlurmLab

from pytest_megatron.doctor.check_machine import check_slurm
from pytest_megatron.doctor.machine import look_at_slurm
from pytest_megatron.doctor.places import Places


def test_doctor_sees_the_client_and_a_controller_that_is_gone(slurm_lab: SlurmLab) -> None:
    places = Places(python=Path(sys.executable), env=slurm_lab.env)
    found = look_at_slurm(places)
    assert (set(found.programs), found.problem) == (
        {"sacct", "sbatch", "scancel", "scontrol", "sinfo", "squeue", "srun"},
        None,
    )
    assert found.programs["sacct"] == "unknown"  # the lab's own, as sites have wrappers
    slurm_lab.kill_controller()
    try:
        gone = look_at_slurm(places)
    finally:
        slurm_lab.mend()
    assert "Unable to contact slurm controller" in (gone.problem or "")
    rules = [[hit.rule for hit in check_slurm(slurm)] for slurm in (found, gone)]
    assert rules == [[], ["slurm-silent"]]

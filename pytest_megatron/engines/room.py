"""The room `engines` in the table."""

from __future__ import annotations

from pytest_megatron.rooms import Room

ROOM = Room(
    commands={
        "sbatch": ("slurm.command:sbatch", "Print the script that runs a workload in Slurm."),
    },
)

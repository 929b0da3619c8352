"""The room `engines` in the table."""

from __future__ import annotations

from pytest_megatron.rooms import Room

ROOM = Room(
    commands={
        "interactive": (
            "slurm.command:interactive",
            "Print how to get a shell of Slurm for a workload.",
        ),
        "sbatch": ("slurm.command:sbatch", "Print the script that runs a workload in Slurm."),
    },
)

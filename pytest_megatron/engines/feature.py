"""The feature `engines` in the table."""

from __future__ import annotations

from pytest_megatron.features import Feature

FEATURE = Feature(
    commands={
        "sbatch": ("slurm.command:sbatch", "Print the script that runs a workload in Slurm."),
    },
)

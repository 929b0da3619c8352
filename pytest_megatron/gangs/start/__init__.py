"""Start of rank processes: environment, mode, preload, template."""

from __future__ import annotations

from pathlib import Path

PACKAGE = str(Path(__file__).parents[2])
_LIBRARIES = ("site-packages", "dist-packages")


def is_library(file: str) -> bool:
    """Return whether a file is one of an installed package."""
    return any(part in _LIBRARIES for part in Path(file).parts) or file.startswith(PACKAGE)


RANK_VARIABLES = frozenset(
    (
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "NODE_RANK"),
        *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "PMI_RANK", "PMIX_RANK"),
        *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    )
)
SIZE_VARIABLES = frozenset(
    (
        *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
        *("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
    )
)

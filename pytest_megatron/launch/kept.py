"""Which variables of an environment a run keeps, so that it can be reproduced. Pure.

The rest of an environment is nobody's business.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence

# Inherited variables that change what a training or a distributed test does.
_KEPT_PREFIXES = (
    *("CUBLAS_", "CUDA_", "GLOO_", "HF_", "LD_", "MASTER_", "MEGATRON_", "MKL_", "NCCL_", "NVTE_"),
    *("OMP_", "PYTHON", "PYTORCH_", "TORCH", "UCX_", "VIRTUAL_ENV", "WANDB_"),
)


def kept_variables(
    env: Mapping[str, str], own: Mapping[str, str] | None = None, names: Sequence[str] = ()
) -> dict[str, str]:
    """Return the variables that are worth keeping.

    Args:
        env: All.
        own: Those that we or the case set; all of them are kept.
        names: Patterns of names that the project wants kept.
    """
    own = own or {}
    return {
        name: value
        for name, value in env.items()
        if name in own
        or name == "PATH"
        or name.startswith(_KEPT_PREFIXES)
        or any(fnmatch.fnmatchcase(name, pattern) for pattern in names)
    }

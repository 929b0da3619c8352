"""What happens on a GPU only."""

from __future__ import annotations

from failure_case import DESYNCED, HUNG, MISFIT, PEER_GONE, Case

_CUDA = ("cuda",)
GPU = (
    Case(id="gpu-memory", fault="gpu_memory", families=("cuda_oom",), devices=_CUDA),
    Case(
        id="gpu-memory-in-pieces",
        fault="gpu_memory_in_pieces",
        families=("cuda_oom",),
        guilty=(1,),
        form="mixed",
        devices=_CUDA,
    ),
    Case(
        id="gpu-assert",
        fault="device_assert",
        families=("device_assert",),
        guilty=(1,),
        devices=_CUDA,
    ),
    Case(
        id="gpu-assert-labelled",
        fault="device_assert",
        families=("device_assert",),
        guilty=(3,),
        form="srun",
        devices=_CUDA,
    ),
    Case(
        id="gpu-illegal-access", fault="illegal_access", families=("illegal_access",), devices=_CUDA
    ),
    Case(
        id="gpu-misaligned",
        fault="misaligned",
        families=("misaligned", "illegal_access"),
        guilty=(0,),
        devices=_CUDA,
    ),
    Case(
        id="gpu-trap",
        fault="trap",
        families=("misaligned", "illegal_access"),
        guilty=(3,),
        form="ours",
        devices=_CUDA,
    ),
    Case(
        id="gpu-hangs",
        fault="gpu_hangs",
        families=HUNG,
        chance="either",
        root="any",  # all wait in one collective, which no GPU ends
        devices=_CUDA,
    ),
    Case(
        id="gpu-exit-0",
        fault="exit_code_0",
        families=(*PEER_GONE, "unknown"),
        guilty=(1,),
        devices=_CUDA,
    ),
    Case(
        id="gpu-desync-extra",
        fault="extra",
        families=MISFIT,
        root="any",  # the others had ended well
        guilty=(3,),
        devices=_CUDA,
    ),
    Case(
        id="gpu-desync-size",
        fault="other_size",
        families=DESYNCED,
        guilty=(1,),
        devices=_CUDA,
    ),
    Case(
        id="gpu-desync-operation",
        fault="other_operation",
        families=DESYNCED,
        guilty=(3,),
        form="ours",
        devices=_CUDA,
    ),
)

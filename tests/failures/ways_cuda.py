"""What happens on a GPU only; kernels that misbehave are compiled on the spot by NVRTC."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ways import way

if TYPE_CHECKING:
    from training import Training

_KERNELS = """
extern "C" __global__ void wild(float* out) { out[1LL << 40] = 1.0f; }
extern "C" __global__ void crooked(char* out) { *(double*)(out + 1) = 1.0; }
extern "C" __global__ void trapped(float* out) { __trap(); }
extern "C" __global__ void endless(volatile float* out) { while (out[0] >= 0.0f) { out[1] += 1; } }
"""


def _launch(training: Training, name: str) -> None:
    import torch

    kernel = torch.cuda._compile_kernel(_KERNELS, name)
    out = torch.zeros(1024, device=training.device)
    kernel((1, 1, 1), (1, 1, 1), (out,))


@way("step")
def gpu_memory(training: Training) -> None:
    import torch

    activations = torch.empty(1 << 40, dtype=torch.uint8, device=training.device)
    print(activations.sum())


@way("step")
def gpu_memory_in_pieces(training: Training) -> None:
    """A leak: as much again at every step, up to a share of the GPU that is all there is."""
    import torch

    torch.cuda.set_per_process_memory_fraction(0.01, training.local_rank)
    kept = [torch.zeros(128 << 20, dtype=torch.uint8, device=training.device) for _ in range(99)]
    print(len(kept))


@way("step")
def device_assert(training: Training) -> None:
    import torch

    table = torch.nn.Embedding(100, 8).to(training.device)
    tokens = torch.tensor([3, 512, 7], device=training.device)
    print(table(tokens).sum().item())


@way("step")
def illegal_access(training: Training) -> None:
    _launch(training, "wild")


@way("step")
def misaligned(training: Training) -> None:
    _launch(training, "crooked")


@way("step")
def trap(training: Training) -> None:
    _launch(training, "trapped")


@way("step")
def gpu_hangs(training: Training) -> None:
    _launch(training, "endless")

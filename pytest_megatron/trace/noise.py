"""Disturb a training at rounding size, to learn how far rounding alone moves each tensor.

Initial parameters and the outputs of modules without children are multiplied by 1 plus a number
of the size of their type's rounding. The draws follow from the seed, the tensor's name and its
place alone, so replicated tensors stay alike and a recomputed one is disturbed as the first time;
the program's random numbers are left alone.
"""

from __future__ import annotations

import hashlib

import torch

from pytest_megatron.trace.shards import local_tensors, local_values


class Noise:
    """Multiplies tensors by 1 plus noise."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def disturb_parameters(self, model: torch.nn.Module, prefix: str) -> None:
        """Disturb all floating tensors that a checkpoint of the model holds."""
        for local in local_tensors(model, prefix):
            values = local_values(local.values)
            if values.is_floating_point():
                parts = local.cut(values)
                disturbed = [
                    part.tensor * self._factors(f"{part.key}/{part.global_offset}", part.tensor)
                    for part in parts
                ]
                values.copy_(local.merge(disturbed))

    def disturb(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Return a tensor disturbed, in its type; the gradient is disturbed alike."""
        return (tensor * self._factors(name, tensor)).to(tensor.dtype)

    def _factors(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        digest = hashlib.sha256(f"{self._seed}/{name}".encode()).digest()
        generator = torch.Generator(tensor.device)
        generator.manual_seed(int.from_bytes(digest[:7], "big"))
        # Computed at least in single precision: a narrow type has nothing between 1 and 1 + eps.
        dtype = torch.promote_types(tensor.dtype, torch.float32)
        draws = torch.rand(tensor.shape, generator=generator, device=tensor.device, dtype=dtype)
        return 1 + torch.finfo(tensor.dtype).eps * (draws - 0.5)

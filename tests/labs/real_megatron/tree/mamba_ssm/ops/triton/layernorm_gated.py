"""Normalise after multiplying with the gate."""

from __future__ import annotations

import torch
from torch.nn import functional


class RMSNorm(torch.nn.Module):
    """Root mean square norm of x * silu(z), over groups of the last axis."""

    def __init__(
        self, hidden_size, eps=1e-5, group_size=None, norm_before_gate=True, device=None, dtype=None
    ):
        super().__init__()
        self.eps = eps
        self.group_size = group_size or hidden_size
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))

    def forward(self, x, z=None):
        values = x.float() if z is None else x.float() * functional.silu(z.float())
        groups = values.unflatten(-1, (-1, self.group_size))
        scale = torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + self.eps)
        return ((groups * scale).flatten(-2) * self.weight.float()).to(x.dtype)

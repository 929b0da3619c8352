"""Scan the states of Mamba 2, all steps at once as one lower triangular matrix."""

from __future__ import annotations

import torch
from torch.nn import functional


def mamba_chunk_scan_combined(
    x,
    dt,
    A,
    B,
    C,
    chunk_size,
    D=None,
    z=None,
    dt_bias=None,
    initial_states=None,
    dt_softplus=False,
    return_final_states=False,
    state_dtype=None,
):
    """Return what the scan gives for x: batch, step, head, value."""
    assert initial_states is None and not return_final_states, "for training only"
    heads = x.shape[2]
    steps = dt.float() if dt_bias is None else dt.float() + dt_bias
    steps = functional.softplus(steps) if dt_softplus else steps
    keys, queries = (t.float().repeat_interleave(heads // t.shape[2], dim=2) for t in (B, C))
    decay = torch.cumsum(steps * A, dim=1).transpose(1, 2)  # batch, head, step
    lengths = decay.unsqueeze(-1) - decay.unsqueeze(-2)
    lower = torch.ones(lengths.shape[-2:], dtype=torch.bool, device=x.device).tril()
    weights = torch.exp(lengths.masked_fill(~lower, float("-inf")))
    scores = torch.einsum("blhn,bshn->bhls", queries, keys) * weights
    out = torch.einsum("bhls,bshp->blhp", scores, x.float() * steps.unsqueeze(-1))
    if D is not None:
        out = out + x.float() * (D if D.dim() == 2 else D.unsqueeze(-1))
    out = out if z is None else out * functional.silu(z.float())
    return out.to(x.dtype)


def mamba_split_conv1d_scan_combined(*args, state_dtype=None, **kwargs):
    """Refuse: the case has --disable-mamba-mem-eff-path."""
    raise NotImplementedError

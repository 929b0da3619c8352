"""The functions of flash-attn 2 that dynamic inference calls, in plain torch: slow."""

from __future__ import annotations

import torch
from torch.nn import functional

__version__ = "2.7.4"


def _attend(q, k, v, softmax_scale):
    """Attend with q as the last of k's steps; step, head, value."""
    groups = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(groups, dim=1).transpose(0, 1).float() for t in (k, v))
    scores = torch.einsum("qhd,hkd->hqk", q.float(), k) * softmax_scale
    at = torch.arange(k.shape[1], device=q.device)
    last = torch.arange(q.shape[0], device=q.device) + k.shape[1] - q.shape[0]
    scores = scores.masked_fill(at[None, :] > last[:, None], float("-inf"))
    return torch.einsum("hqk,hkd->qhd", functional.softmax(scores, dim=-1), v).to(q.dtype)


def _cached(cache, blocks, length):
    size = cache.shape[1]
    return cache[blocks[: -(-length // size)].long()].flatten(0, 1)[:length]


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    block_table=None,
    return_attn_probs=False,
):
    """Attend in each of the sequences that lie one after the other."""
    assert causal and block_table is not None and not return_attn_probs
    out = torch.zeros_like(q)
    starts, lengths = cu_seqlens_q.tolist(), cu_seqlens_k.diff().tolist()
    for i, length in enumerate(lengths):
        rows = slice(starts[i], starts[i + 1])
        if length and rows.stop > rows.start:
            keys, values = (_cached(t, block_table[i], length) for t in (k, v))
            out[rows] = _attend(q[rows], keys, values, softmax_scale)
    return out


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    cache_seqlens=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    block_table=None,
    num_splits=0,
    **_,
):
    """Attend with the last steps of each request."""
    assert k is None and block_table is not None
    out = torch.zeros_like(q)
    for i, length in enumerate(cache_seqlens.tolist()):
        if length:
            keys, values = (_cached(t, block_table[i], length) for t in (k_cache, v_cache))
            out[i] = _attend(q[i], keys, values, softmax_scale)
    return out

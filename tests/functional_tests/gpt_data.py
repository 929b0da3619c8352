"""Synthetic text for the training program: learnable, and the same in every parallel layout.

A sample is a noisy Markov chain: each token is followed by its one successor with a probability of
`FOLLOW_PERCENT` and by any token otherwise. It is a pure function of (seed, sample index), made
with integer arithmetic alone, so that it is the same on every machine and in every version of
numpy and torch. Must not read files or draw from a global generator.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

FOLLOW_PERCENT = 90


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One microbatch of one data-parallel rank.

    Attributes:
        tokens: (micro_batch_size, seq_length), int64.
        labels: The token that follows each of `tokens`, in the same shape.
        position_ids: 0 to seq_length - 1 in each row.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """The endless sequence of samples that `seed` stands for."""

    seed: int
    vocab_size: int
    seq_length: int

    def sample(self, index: int) -> NDArray[np.int64]:
        """Make one sample: seq_length + 1 tokens, the last one being only a label."""
        length = self.seq_length + 1
        of_seed = _scramble(np.array([self.seed], dtype=np.uint64))
        of_sample = _scramble(np.array([index], dtype=np.uint64) + of_seed)
        counters: NDArray[np.uint64] = np.arange(2 * length, dtype=np.uint64) + of_sample
        draws = _scramble(counters)
        chances = (draws[:length] % np.uint64(100)).tolist()
        noise = (draws[length:] % np.uint64(self.vocab_size)).tolist()
        tokens = [noise[0]]
        for chance, token in zip(chances[1:], noise[1:], strict=True):
            is_follower = chance < FOLLOW_PERCENT
            tokens.append((5 * tokens[-1] + 17) % self.vocab_size if is_follower else token)
        return np.array(tokens, dtype=np.int64)

    def batch(self, first_index: int, size: int, device: torch.device) -> Batch:
        """Collate the samples `first_index` to `first_index + size - 1`."""
        rows = np.stack([self.sample(first_index + row) for row in range(size)])
        text = torch.from_numpy(rows).to(device)
        positions = torch.arange(self.seq_length, device=device).expand(size, -1)
        return Batch(
            tokens=text[:, :-1].contiguous(),
            labels=text[:, 1:].contiguous(),
            position_ids=positions.contiguous(),
        )


def first_indices(
    consumed_samples: int, *, num_microbatches: int, micro_batch_size: int, dp: tuple[int, int]
) -> Iterator[int]:
    """Where each microbatch of one iteration starts in the sequence of samples.

    Args:
        consumed_samples: Samples of all earlier iterations, over all ranks.
        num_microbatches: Microbatches of this rank per iteration.
        micro_batch_size: Samples per microbatch.
        dp: Data-parallel rank and size. The ranks take turns, so that an iteration trains on the
            same samples whatever the size is.
    """
    dp_rank, dp_size = dp
    for microbatch in range(num_microbatches):
        yield consumed_samples + (microbatch * dp_size + dp_rank) * micro_batch_size


def _scramble(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix the bits of each value (the finaliser of SplitMix64); wraps around silently."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))

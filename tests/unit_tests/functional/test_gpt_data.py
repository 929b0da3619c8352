from __future__ import annotations

import random

import numpy as np
import torch
from gpt_data import FOLLOW_PERCENT, Dataset, first_indices

DATA = Dataset(seed=1234, vocab_size=256, seq_length=64)


def test_a_sample_is_a_function_of_seed_and_index_alone() -> None:
    first = DATA.sample(7)
    random.seed(1)
    torch.manual_seed(1)
    again = Dataset(seed=1234, vocab_size=256, seq_length=64).sample(7)
    assert (first == again).all()
    assert first[:6].tolist() == [222, 103, 20, 117, 90, 211]
    assert (first != DATA.sample(8)).any()
    assert (first != Dataset(seed=1235, vocab_size=256, seq_length=64).sample(7)).any()


def test_most_tokens_follow_from_the_one_before() -> None:
    rows = np.stack([DATA.sample(index) for index in range(50)])
    share = ((5 * rows[:, :-1] + 17) % 256 == rows[:, 1:]).mean()
    assert abs(share * 100 - FOLLOW_PERCENT) < 2
    assert (rows.min(), rows.max()) == (0, 255)


def test_labels_are_the_next_tokens() -> None:
    batch = DATA.batch(3, 2, torch.device("cpu"))
    assert (batch.tokens.shape, batch.labels.shape) == ((2, 64), (2, 64))
    assert torch.equal(batch.tokens[:, 1:], batch.labels[:, :-1])
    assert batch.position_ids.tolist() == [list(range(64))] * 2


def test_ranks_share_out_the_samples_that_one_rank_would_take() -> None:
    alone = set(first_indices(80, num_microbatches=4, micro_batch_size=2, dp=(0, 1)))
    shared = [
        set(first_indices(80, num_microbatches=2, micro_batch_size=2, dp=(rank, 2)))
        for rank in (0, 1)
    ]
    assert (shared[0] | shared[1], shared[0] & shared[1]) == (alone, set())

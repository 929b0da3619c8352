from __future__ import annotations

import numpy as np
import pytest

from pytest_megatron.trace.files import TraceLayout
from pytest_megatron.trace.merge import (
    Axes,
    NotMergedError,
    Reading,
    as_rows,
    axis_chunks,
    is_expert,
    readings_of,
    sorted_rows,
    split_sizes,
)
from pytest_megatron.trace.pieces import sequence_chunks

_BOTH = (True, True)
_PLAIN = TraceLayout()
_SP = TraceLayout(tp=(1, 2), sequence_parallel=True)
_CP_SP = TraceLayout(tp=(0, 2), cp=(0, 2), sequence_parallel=True)


@pytest.mark.parametrize(
    ("shape", "layout", "reading", "axes"),
    [
        ((16, 2, 8), _PLAIN, Reading.SEQUENCE_BATCH, Axes((0, 1, 2), _BOTH)),
        ((8, 2, 8), _SP, Reading.SEQUENCE_BATCH, Axes((0, 1, 2), _BOTH, None, 2)),
        ((4, 2, 8), _CP_SP, Reading.SEQUENCE_BATCH, Axes((0, 1, 2), _BOTH, None, 4)),
        ((2, 16), _PLAIN, Reading.BATCH_SEQUENCE, Axes((1, 0), _BOTH)),
        ((2, 16, 8), _PLAIN, Reading.BATCH_SEQUENCE, Axes((1, 0, 2), _BOTH)),
        ((2, 4, 16, 16), _PLAIN, Reading.SCORES, Axes((2, 0, 1, 3), _BOTH)),
        ((16, 4), _SP, Reading.SEQUENCE_OUTSIDE, Axes((0, 1, 2), _BOTH, (8, 2), 2)),
        ((32, 4), _PLAIN, Reading.BATCH_OUTSIDE, Axes((1, 0, 2), _BOTH, (2, 16))),
        ((16, 1, 1, 8), _PLAIN, Reading.SEQUENCE, Axes((0, 1, 2, 3), (True, False))),
        ((2, 8), _PLAIN, Reading.BATCH, Axes((0, 1), (False, True))),
        ((8,), _PLAIN, Reading.NEITHER, Axes((0,))),
        ((7, 9), _PLAIN, Reading.NEITHER, Axes((0, 1))),
    ],
)
def test_axes_follow_from_sizes(
    shape: tuple[int, ...], layout: TraceLayout, reading: Reading, axes: Axes
) -> None:
    found = readings_of(shape, 16, 2, layout)
    assert next(iter(found)) == reading or reading is Reading.BATCH_OUTSIDE
    assert found[reading] == axes


def test_equal_sizes_can_be_read_in_both_orders() -> None:
    found = readings_of((4, 4, 8), 4, 4, _PLAIN)
    assert {Reading.SEQUENCE_BATCH, Reading.BATCH_SEQUENCE} <= found.keys()


def test_tokens_have_the_sequence_or_the_batch_outside() -> None:
    tokens = np.arange(6.0).reshape(6, 1)
    found = readings_of((6, 1), 3, 2, _PLAIN)
    assert found[Reading.SEQUENCE_OUTSIDE].view(tokens)[:, 1, 0].tolist() == [1, 3, 5]
    assert found[Reading.BATCH_OUTSIDE].view(tokens)[:, 1, 0].tolist() == [3, 4, 5]


@pytest.mark.parametrize(("shape", "rows"), [((0, 4), (0, 4)), ((0,), (0, 1)), ((3, 0), (3, 0))])
def test_an_expert_without_tokens_has_no_rows(shape: tuple[int, ...], rows: object) -> None:
    assert as_rows(np.zeros(shape)).shape == rows


@pytest.mark.parametrize(("cp", "tp"), [(1, 2), (2, 1), (2, 2), (4, 1), (2, 4)])
def test_ranks_share_a_sequence_without_gap_or_overlap(cp: int, tp: int) -> None:
    length = 16
    held = []
    for cp_rank in range(cp):
        for tp_rank in range(tp):
            chunks = sequence_chunks(length, (cp_rank, cp), (tp_rank, tp))
            local = [place for _, of in chunks for place in range(of.start, of.stop)]
            assert local == list(range(length // (cp * tp)))
            held += [place for to, _ in chunks for place in range(to.start, to.stop)]
    assert sorted(held) == list(range(length))


def test_first_context_parallel_rank_has_both_ends() -> None:
    chunks = sequence_chunks(8, (0, 2), (0, 1))
    assert [to for to, _ in chunks] == [slice(0, 2), slice(6, 8)]


@pytest.mark.parametrize(
    ("reference", "candidate", "sizes", "split"),
    [
        pytest.param((8,), (4,), (1, 2), (True,), id="cut"),
        pytest.param((8,), (8,), (1, 2), (False,), id="whole on each"),
        pytest.param((4, 8), (2, 8), (1, 2), (True, False), id="heads"),
        pytest.param((4,), (2,), (2, 4), (True,), id="both cut"),
        pytest.param((4,), (8,), (2, 1), (True,), id="reference cut"),
    ],
)
def test_sizes_tell_what_tensor_parallel_ranks_share(
    reference: tuple[int, ...],
    candidate: tuple[int, ...],
    sizes: tuple[int, int],
    split: tuple[bool, ...],
) -> None:
    assert split_sizes(reference, candidate, sizes) == split


@pytest.mark.parametrize(
    ("reference", "candidate"),
    [
        pytest.param((8,), (3,), id="no part"),
        pytest.param((8, 8), (4, 4), id="two axes"),
        pytest.param((8,), (8, 1), id="other axes"),
    ],
)
def test_sizes_that_no_rule_explains_are_not_merged(
    reference: tuple[int, ...], candidate: tuple[int, ...]
) -> None:
    with pytest.raises(NotMergedError):
        split_sizes(reference, candidate, (1, 2))


def test_padded_vocabulary_is_cut() -> None:
    assert split_sizes((100,), (64,), (1, 2), may_be_padded=True) == (True,)


def test_gated_output_is_a_part_of_both_halves() -> None:
    assert axis_chunks(4, (1, 2), is_gated=True) == [
        (slice(2, 4), slice(0, 2)),
        (slice(6, 8), slice(2, 4)),
    ]


def test_rows_of_experts_have_no_order() -> None:
    rows = np.random.default_rng(1).normal(size=(9, 3))
    a, b = sorted_rows(rows, rows[::-1])
    assert np.array_equal(a, b)


def test_rows_of_other_numbers_are_compared_by_quantiles() -> None:
    rows = np.random.default_rng(1).normal(size=(200, 3))
    a, b = sorted_rows(rows, rows[:-1])
    assert a.shape == b.shape
    assert np.linalg.norm(a - b) < 0.1 * np.linalg.norm(a)
    a, b = sorted_rows(rows, 2 * rows[:-1])
    assert np.linalg.norm(a - b) > 0.9 * np.linalg.norm(a)


@pytest.mark.parametrize(
    ("module", "is_one"),
    [
        ("decoder.layers.0.mlp.experts.local_experts.3.linear_fc1", True),
        ("decoder.layers.0.mlp.experts", True),
        ("decoder.layers.0.mlp.shared_experts.linear_fc1", False),
        ("decoder.layers.0.mlp.router", False),
    ],
)
def test_modules_of_experts(module: str, is_one: bool) -> None:  # noqa: FBT001
    assert is_expert(module) == is_one

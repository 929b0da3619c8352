"""Which ranks are run."""

from __future__ import annotations

from pytest_megatron.layouts.model import (
    Call,
    MadeGroup,
    RankRecord,
    choose,
    kinds_of,
    partitions_of,
)


def grid(tp: int, dp: int, pp: int) -> RankRecord:
    """Rank 0 of a grid, which sends to the next stage."""
    size, per_stage = tp * dp * pp, tp * dp
    groups = [list(range(i, i + tp)) for i in range(0, size, tp)]
    groups += [
        list(range(s * per_stage + t, (s + 1) * per_stage, tp))
        for s in range(pp)
        for t in range(tp)
    ]
    groups += [list(range(i, size, per_stage)) for i in range(per_stage)]
    record = RankRecord(rank=0, world_size=size)
    record.groups = [MadeGroup(str(i), ranks, "nccl", "") for i, ranks in enumerate(groups)]
    record.calls = [Call("0", 0, "send", "float32", [[1]], 1, "", 0, 4, peer=per_stage)]
    return record


def test_small_worlds_run_whole() -> None:
    assert choose(4, 12, None) == [0, 1, 2, 3]


def test_a_pipeline_runs_whole_with_the_ends_of_the_groups_of_its_ends() -> None:
    chosen = choose(512, 12, grid(8, 8, 8))
    assert chosen[:8] == [0, 64, 128, 192, 256, 320, 384, 448]
    assert set(chosen[8:]) == {7, 56, 455, 504}


def test_a_long_pipeline_runs_its_ends_and_its_middle() -> None:
    chosen = choose(64, 12, grid(2, 2, 16))
    assert {0, 4, 32, 28, 56, 60} < set(chosen)


def test_groups_of_equal_steps_are_one_partition() -> None:
    partitions = partitions_of(grid(4, 2, 2), 16)
    assert [len(partition) for partition in partitions] == [8, 8, 4]
    assert partitions[2] == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15)]


def test_one_rank_stands_for_those_that_make_the_same_calls() -> None:
    first, last, same = grid(2, 2, 2), grid(2, 2, 2), grid(2, 2, 2)
    last.rank, same.rank = 7, 3
    last.calls[0].kind = "recv"
    kinds = kinds_of([same, last, first])
    assert [[record.rank for record in kind] for kind in kinds] == [[0, 3], [7]]

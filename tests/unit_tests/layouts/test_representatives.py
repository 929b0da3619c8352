"""Which ranks are run."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_megatron.layouts.model import (
    Call,
    MadeGroup,
    RankRecord,
    choose,
    kinds_of,
    partitions_of,
)
from pytest_megatron.layouts.named import named_ranks


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


def test_ranks_that_the_program_names_are_chosen_with_one_beside_them() -> None:
    first = grid(2, 8, 4)
    usual = choose(64, 12, first)
    assert usual == [0, 16, 32, 48, 1, 49, 14, 62, 63, 2, 8, 50]
    chosen = choose(64, 12, first, [frozenset({5})])
    assert chosen == [*usual[:8], 5, 4, 21, 63]  # of its data-parallel group, rank 1 is there
    of_eight = frozenset(range(7, 64, 8))
    assert choose(64, 12, first, [of_eight]) == [*usual[:8], 15, 63, 2, 8]
    many = [frozenset({rank}) for rank in (0, 63, 3, 5, 7, 9)]
    assert choose(64, 12, first, many)[8:] == [3, 2, 5, 4]
    large = grid(8, 8, 8)  # there is room for no other
    usual = choose(512, 12, large)
    assert choose(512, 12, large, [frozenset({5})]) == [*usual[:11], 5]
    assert choose(512, 12, large, many) == [*usual[:9], 63, 3, 5]


@pytest.mark.parametrize(
    ("code", "ranks"),
    [
        ("if rank == 5 and x: y()", [{5}]),
        ("if int(os.environ['RANK']) != 5: y()", [{5}]),
        ("if os.environ.get('RANK') == '5': y()", [{5}]),
        ("if dist.get_rank() % 8 == 7: y()", [{7, 15}]),
        ("if args.local_rank in (2, 3): y()", [{2, 3, 10, 11}]),
        ("if dist.get_rank() == dist.get_world_size() - 2: y()", [{14}]),
        ("if rank // 4 == 3: y()", [{12, 13, 14, 15}]),
        ("if 4 <= rank < 6: y()", [{4, 5}]),
        ("if rank % 8 == 7 and rank > 8 and x == y(): y()", [{7, 15}, {*range(9, 16)}]),
        ("if dist.get_rank(group) == 5 or tp_rank == 1 or rank == other(): y()", []),
        ("rank = rank + 1\nif size == 5 or rank is None or rank > 99: y()", []),
        ("rank ==", []),
    ],
)
def test_conditions_on_the_number_of_a_rank_name_it(
    tmp_path: Path, code: str, ranks: list[set[int]]
) -> None:
    (tmp_path / "train.py").write_text(code)
    sources = [str(tmp_path / name) for name in ("train.py", "absent.py")]
    rare = [found for found in named_ranks(sources, 16, 8) if len(found) < 8]
    assert [set(found) for found in rare if found != {0, 8}] == ranks


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

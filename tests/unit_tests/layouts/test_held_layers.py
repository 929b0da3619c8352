"""Layers over the stages of a pipeline."""

from __future__ import annotations

import pytest

from pytest_megatron.layouts.judge import judge
from pytest_megatron.layouts.model import Call, MadeGroup, RankRecord


def message(group: str, index: int, kind: str, peer: int) -> Call:
    return Call(group, index, kind, "float32", [[4]], 1, "p.py:1", index, 16, peer=peer)


def pipeline(*stages: list[int], run: range | None = None) -> dict[int, RankRecord]:
    """Ranks of which each holds some layers, and sends to the next."""
    found = {}
    for rank in run or range(len(stages)):
        record = RankRecord(rank=rank, world_size=len(stages), end="whole")
        record.groups = [MadeGroup("0", list(range(len(stages))), "gloo", "p.py:0")]
        record.layers = {"decoder.layers": stages[rank]} if stages[rank] else {}
        if rank > 0:
            record.calls.append(message("0", 0, "recv", rank - 1))
        if rank < len(stages) - 1:
            record.calls.append(message("0", 1, "send", rank + 1))
        found[rank] = record
    return found


@pytest.mark.parametrize(
    "stages",
    [
        ([0], [1, 2, 3], [4, 5, 6], [7]),  # uneven
        ([1, 5], [2, 6], [3, 7], [4, 8]),  # virtual pipeline
        ([], [1, 2], [3, 4], []),  # embedding and head alone
    ],
)
def test_sound_pipelines_hold_each_layer_once(stages: tuple[list[int], ...]) -> None:
    layout = judge(pipeline(*stages))
    assert (layout.faults, layout.left_out) == ((), ())


@pytest.mark.parametrize(
    ("stages", "ranks", "text"),
    [
        (
            ([1, 2], [3, 4], [4, 5], [6, 7]),
            (1, 2),
            (
                "layer 4 of decoder.layers is held twice: rank 1 holds layers 3-4, "
                "rank 2 holds layers 4-5"
            ),
        ),
        (
            ([0, 1], [4, 5], [6, 7]),
            (0, 1),
            (
                "layers 2-3 of decoder.layers are held by no rank: rank 0 holds layers 0-1, "
                "rank 1 holds layers 4-5"
            ),
        ),
        (
            ([1, 2], [], [4, 5]),
            (0, 2),
            (
                "layer 3 of decoder.layers is held by no rank: rank 0 holds layers 1-2, "
                "rank 2 holds layers 4-5"
            ),
        ),
        (
            ([1, 3], [4]),
            (0,),
            "layer 2 of decoder.layers is held by no rank: rank 0 holds layers 1, 3",
        ),
    ],
)
def test_a_layer_that_is_held_twice_or_by_none_is_a_fault(
    stages: tuple[list[int], ...], ranks: tuple[int, ...], text: str
) -> None:
    (fault,) = judge(pipeline(*stages)).faults
    assert (fault.kind, fault.ranks, fault.text) == ("parameters", ranks, text)


@pytest.mark.parametrize(
    "stages", [([0, 1], [0, 1]), ([0], [0, 1, 2]), ([0, 1, 0, 1], [2, 3, 2, 3])]
)
def test_numbers_that_begin_again_are_not_judged_and_the_report_says_so(
    stages: tuple[list[int], ...],
) -> None:
    layout = judge(pipeline(*stages))
    assert layout.faults == ()
    assert layout.left_out == ("layers of decoder.layers, whose numbers begin again in each rank",)


def test_layers_of_ranks_that_were_not_run_are_named() -> None:
    stages = [[2 * rank, 2 * rank + 1] for rank in range(8)]
    records = pipeline(*stages)
    layout = judge({rank: records[rank] for rank in (0, 1, 2, 5, 6, 7)})
    assert layout.faults == ()
    assert layout.left_out[0] == (
        "layers 6-9 of decoder.layers, since ranks that may hold them were not run"
    )

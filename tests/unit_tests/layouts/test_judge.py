"""Records of ranks that agree, and of ranks that differ in one thing."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import pytest

from pytest_megatron.layouts.judge import judge
from pytest_megatron.layouts.model import Call, MadeGroup, RankRecord
from pytest_megatron.runs.record import RankMemory, RecordedFault, RecordedLayout

GIB = 1 << 30
Records = dict[int, RankRecord]


def rank_of(rank: int, world_size: int = 4) -> RankRecord:
    world = list(range(world_size))
    return RankRecord(
        rank=rank,
        world_size=world_size,
        groups=[MadeGroup("0", world, "nccl", "a.py:1"), MadeGroup("1", [0, 1], "nccl", "a.py:2")],
        steps=2,
        forwards=[4, 4],
        models=["Net"],
        end="whole",
    )


def add(record: RankRecord, kind: str = "all_reduce", **changes: object) -> Call:
    """Append a call that the program waits for at once."""
    group = changes.pop("group", "0")
    index = sum(call.group == group for call in record.calls)
    clock = 2 * len(record.calls)
    values: dict[str, object] = {
        "group": group, "index": index, "kind": kind, "dtype": "float32", "shapes": [[4, 8]],
        "step": 1, "line": f"train.py:{10 + len(record.calls)}", "issued": clock,
        "waited": clock + 1, "num_bytes": 128, "reduction": "sum" if "reduce" in kind else "",
    }  # fmt: skip
    call = Call(**{**values, **changes})  # type: ignore[arg-type]
    record.calls.append(call)
    return call


@pytest.fixture
def records() -> Records:
    """Ranks 0, 1 and 3 of four that reduce, gather in a small group, and send around."""
    found = {rank: rank_of(rank) for rank in (0, 1, 3)}
    for rank, record in found.items():
        add(record)
        if rank < 2:
            add(record, "all_gather", group="1")
        add(record, "barrier", dtype="", shapes=[])
    add(found[0], "send", peer=1, group="0")
    add(found[1], "recv", peer=0, group="0")
    return found


def test_ranks_that_agree_have_no_fault(records: Records) -> None:
    layout = judge(records)
    assert (layout.faults, layout.undecided, layout.num_compared) == ((), (), 6)


def only_fault(layout: RecordedLayout) -> RecordedFault:
    (fault,) = layout.faults
    return fault


@pytest.mark.parametrize(
    ("change", "kind", "ranks", "words"),
    [
        (lambda r: setattr(r[3].calls[0], "kind", "all_gather"), "collective", (0, 3), "kind"),
        (lambda r: setattr(r[3].calls[0], "dtype", "bfloat16"), "collective", (0, 3), "dtype"),
        (lambda r: setattr(r[3].calls[0], "shapes", [[4, 9]]), "collective", (0, 3), "size"),
        (lambda r: setattr(r[3].calls[0], "reduction", "max"), "collective", (0, 3), "reduction"),
        (lambda r: r[1].calls.pop(1), "collective", (0, 1), "rank 0 alone"),
        (lambda r: r[1].calls.pop(3), "message", (0, 1), "never received by rank 1"),
        (lambda r: r[0].calls.pop(3), "message", (1, 0), "never sent by rank 0"),
        (lambda r: setattr(r[1].calls[3], "shapes", [[2]]), "message", (0, 1), "received as"),
        (lambda r: setattr(r[3], "forwards", [4, 3]), "micro-batches", (0, 3), "step 2"),
        (lambda r: setattr(r[1].groups[1], "ranks", [1, 2]), "groups", (0, 1), "another order"),
        (lambda r: (r[1].groups.pop(), r[1].calls.pop(1)), "groups", (0, 1), "never by rank 1"),
    ],
)
def test_a_difference_names_both_ranks(
    records: Records,
    change: Callable[[Records], object],
    kind: str,
    ranks: tuple[int, ...],
    words: str,
) -> None:
    change(records)
    fault = only_fault(judge(records))
    assert (fault.kind, fault.ranks) == (kind, ranks)
    assert words in fault.text


def test_a_fault_has_index_operation_and_both_lines(records: Records) -> None:
    records[3].calls[0].shapes = [[4, 9]]
    fault = only_fault(judge(records))
    assert fault.text == (
        "collective 0 of the group [0, 1, 2, 3], in step 1, differs in size: rank 0 "
        "all_reduce(sum) of float32 [4, 8], rank 3 all_reduce(sum) of float32 [4, 9]"
    )
    assert fault.lines == ((0, "train.py:10"), (3, "train.py:10"))


def test_what_a_rank_begins_after_its_last_step_needs_no_counterpart(records: Records) -> None:
    for record in records.values():
        record.end, record.num_judged = "cut", len(record.calls)
    add(records[3])
    assert judge(records).faults == ()
    records[3].num_judged += 1
    assert only_fault(judge(records)).ranks == (3, 0)
    records[3].calls[-1].kind, records[3].calls[-1].peer = "recv", 0
    records[3].calls[-1].step = 3  # rank 0 ended in its third step, before it sent
    assert judge(records).faults == ()


def test_sends_to_one_another_before_receives_block() -> None:
    records = {rank: rank_of(rank, 2) for rank in (0, 1)}
    for rank, record in records.items():
        add(record, "send", peer=1 - rank)
        add(record, "recv", peer=1 - rank)
    fault = only_fault(judge(records))
    assert (fault.kind, fault.ranks) == ("cycle", (0, 1))
    assert "rank 0 in send 0" in fault.text
    assert "waits for rank 1" in fault.text


def test_messages_in_one_batch_do_not_block() -> None:
    records = {rank: rank_of(rank, 2) for rank in (0, 1)}
    for rank, record in records.items():
        for clock, kind in enumerate(("send", "recv")):
            add(record, kind, peer=1 - rank, batch=0, issued=clock, waited=clock + 2)
    assert judge(records).faults == ()


def test_unbatched_messages_of_nccl_wait_for_one_another() -> None:
    records = {rank: rank_of(rank, 2) for rank in (0, 1)}
    for rank, record in records.items():
        for clock, kind in enumerate(("send", "recv")):
            add(record, kind, peer=1 - rank, issued=clock, waited=clock + 2)
    assert only_fault(judge(records)).kind == "cycle"
    for record in records.values():
        record.groups[0].backend = "gloo"  # has no order between messages of both directions
    assert judge(records).faults == ()


@pytest.mark.parametrize(
    ("backend", "batches", "ranks"),
    [
        ("nccl", (0, None), (0, 1)),
        ("nccl", (None, 0), (1, 0)),
        ("nccl", (0, 1), None),
        ("gloo", (0, None), None),
        ("nccl, eager", (0, None), None),  # one communicator for both
    ],
)
def test_a_batched_message_and_an_unbatched_one_have_other_communicators(
    backend: str, batches: tuple[int | None, int | None], ranks: tuple[int, int] | None
) -> None:
    records = {rank: rank_of(rank, 2) for rank in (0, 1)}
    for (rank, record), batch in zip(records.items(), batches, strict=True):
        record.groups[0].backend = backend
        add(record, ("send", "recv")[rank], peer=1 - rank, batch=batch)
    faults = judge(records).faults
    assert [(fault.kind, fault.ranks) for fault in faults] == (
        [("message", ranks)] if ranks else []
    )
    assert all(
        fault.lines == ((ranks[0], "train.py:10"), (ranks[1], "train.py:10"))
        for fault in faults
        if ranks
    )


def test_batched_messages_may_overtake_unbatched_ones() -> None:
    records = {rank: rank_of(rank, 2) for rank in (0, 1)}
    for clock, (batch, width) in enumerate(((0, 2), (None, 3))):
        add(
            records[0],
            "send",
            peer=1,
            batch=batch,
            shapes=[[width]],
            issued=clock,
            waited=clock + 2,
        )
    for clock, (batch, width) in enumerate(((None, 3), (0, 2))):
        add(
            records[1],
            "recv",
            peer=0,
            batch=batch,
            shapes=[[width]],
            issued=clock,
            waited=clock + 2,
        )
    assert judge(records).faults == ()


def test_two_groups_in_another_order_block(records: Records) -> None:
    first, second = records[1].calls[:2]
    first.issued, first.waited, second.issued, second.waited = 2, 3, 0, 1
    fault = only_fault(judge(records))
    assert (fault.kind, set(fault.ranks)) == ("cycle", {0, 1})


def test_a_rank_over_its_memory_is_named_with_what_it_holds(records: Records) -> None:
    records[3].memory = RankMemory(peak=81 * GIB, parameters=60 * GIB)
    fault = only_fault(judge(records, memory_bytes=80 * GIB))
    assert (fault.kind, fault.ranks) == ("memory", (3,))
    assert "needs 81.0 GiB at its peak, and its GPU has 80.0 GiB: parameters 60.0 GiB" in fault.text


def test_an_object_that_nobody_has_sent_decides_nothing(records: Records) -> None:
    records[1].end, records[1].problem, records[1].problem_line = "unknown", "EOFError", "m.py:3"
    records[3].end, records[3].problem = "failed", "it got nothing"
    records[1].calls, records[3].calls = records[1].calls[:1], records[3].calls[:1]
    found = judge(records)
    assert found.faults == ()
    assert [(fault.kind, fault.ranks) for fault in found.undecided] == [
        ("undecided", (1,)),
        ("undecided", (3,)),
    ]
    assert found.undecided[0].lines == ((1, "m.py:3"),)


def test_a_failed_rank_is_the_fault_and_its_missing_calls_are_none(records: Records) -> None:
    records[1].end, records[1].problem, records[1].problem_line = "failed", "ValueError", "m.py:3"
    records[1].calls.clear()
    fault = only_fault(judge(records))
    assert (fault.kind, fault.ranks, fault.lines) == ("failed", (1,), ((1, "m.py:3"),))


def test_a_rank_that_hangs_on_data_of_others_is_not_decided(records: Records) -> None:
    other = deepcopy(records[3])
    other.calls[1].kind = "broadcast"
    other.calls[1].read = records[3].calls[1].read = "train.py:9"
    layout = judge(records, others=[other])
    (found,) = layout.undecided
    assert (layout.faults, found.ranks) == ((), (3,))
    assert found.lines[0] == (3, "train.py:9")


def test_what_ranks_of_its_kind_do_then_is_not_compared() -> None:
    records = {rank: rank_of(rank) for rank in (0, 1, 3)}
    for rank, record in records.items():
        add(record)
        if rank:  # has read that it is to make a group, and to reduce in the world once more
            record.groups.append(MadeGroup("2", [0, rank], "nccl", "train.py:20", after=2))
            add(record, line="train.py:21", read="train.py:19")
    again = deepcopy(records[1])
    assert [fault.kind for fault in judge(records, others=[again]).faults] == ["groups"]
    again.calls[-1].line = "train.py:22"  # the same call, of what comes next
    layout = judge(records, others=[again])
    (found,) = layout.undecided
    assert (layout.faults, found.lines[0]) == ((), (1, "train.py:19"))
    assert "hangs on what other ranks have sent, which line train.py:19 reads" in found.text


def test_groups_that_hang_on_data_of_others_are_not_decided(records: Records) -> None:
    records[3].groups.append(MadeGroup("2", [0, 3], "nccl", "train.py:20", after=2))
    assert [fault.kind for fault in judge(records).faults] == ["groups"]
    again = deepcopy(records[3])
    again.groups.pop()
    layout = judge(records, others=[again])
    assert [fault.ranks for fault in layout.undecided] == [(3,)]
    assert layout.faults == ()
    again.end = "failed"  # on data that no rank sends: it tells nothing
    assert [fault.kind for fault in judge(records, others=[again]).faults] == ["groups"]


def test_a_failure_on_data_of_others_is_not_decided(records: Records) -> None:
    other = deepcopy(records[3])
    records[3].end, records[3].problem, records[3].problem_line = "failed", "IndexError", "m.py:3"
    records[3].calls.pop()
    layout = judge(records, others=[other])
    assert layout.faults == ()
    assert (3, "m.py:3") in layout.undecided[0].lines


def test_sizes_that_follow_data_are_not_compared(records: Records) -> None:
    records[3].calls[0].shapes = [[4, 9]]
    other = deepcopy(records[3])
    other.calls[0].shapes = [[4, 7]]
    layout = judge(records, others=[other])
    assert (layout.faults, layout.undecided) == ((), ())
    assert layout.left_out == ("sizes at train.py:10, which follow the data",)


@pytest.mark.parametrize(
    ("shape", "num_faults"),
    [([9, 8], 0), ([0, 8], 0), ([9], 1), ([4, 7], 1)],
)
def test_rows_of_sizes_that_follow_data_are_compared(
    records: Records, shape: list[int], num_faults: int
) -> None:
    records[3].calls[0].shapes = [shape]
    other = deepcopy(records[1])
    other.calls[0].shapes = [[7, 8]]
    faults = judge(records, others=[other]).faults
    assert [(f.kind, f.ranks) for f in faults] == [("collective", (0, 3))] * num_faults


def test_calls_of_groups_with_one_rank_here_are_counted_as_left_out(records: Records) -> None:
    del records[1]
    layout = judge(records)
    assert layout.left_out == ("2 calls, since their other ranks were not run",)


def exchange(record: RankRecord, sent: list[int], received: list[int]) -> None:
    add(record, "all_to_all", shapes=[[sum(sent)]], sent=sent, received=received)


def test_parts_of_an_exchange_are_compared_pair_by_pair() -> None:
    records = {rank: rank_of(rank, 3) for rank in range(3)}
    exchange(records[0], [4, 4, 4], [4, 4, 4])
    exchange(records[1], [4, 4, 4], [4, 4, 4])
    exchange(records[2], [4, 4, 4], [4, 4, 4])
    assert judge(records).faults == ()
    records[2].calls[0].sent = [4, 5, 3]
    (first, *_) = judge(records).faults
    assert (first.kind, first.ranks) == ("collective", (2, 1))
    assert first.text.endswith(
        "rank 2 all_to_all of float32 [12] sends 5 elements to rank 1, which expects 4"
    )
    records[1].calls[0].received = [4, 4, 5]
    assert only_fault(judge(records)).ranks == (2, 2)  # what it keeps


def test_equal_parts_meet_parts_of_given_sizes() -> None:
    records = {rank: rank_of(rank, 2) for rank in range(2)}
    add(records[0], "all_to_all", shapes=[[8]])
    exchange(records[1], [4, 6], [4, 6])
    assert judge(records).faults == ()
    records[1].calls[0].received = [3, 7]
    assert only_fault(judge(records)).ranks == (0, 1)


def test_parts_that_follow_data_are_not_compared() -> None:
    records = {rank: rank_of(rank, 2) for rank in range(2)}
    exchange(records[0], [5, 3], [4, 4])
    exchange(records[1], [4, 4], [4, 4])
    others = [deepcopy(records[1])]
    others[0].calls[0].received = [6, 2]
    assert judge(records, others=others).faults == ()


def test_a_call_that_waits_behind_another_of_its_rank_blocks() -> None:
    """Rank 0 awaits a message unbatched, which rank 1 sends behind a batch that rank 0 lacks."""
    records = {rank: rank_of(rank, 2) for rank in (0, 1)}
    add(records[0], "recv", peer=1)
    add(records[0], "all_reduce")
    add(records[1], "all_reduce")
    add(records[1], "send", peer=0)
    assert only_fault(judge(records)).kind == "cycle"

"""Sends and receives of the default group, of which ranks do different numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

pytestmark = [
    pytest.mark.usefixtures("process_group"),
    pytest.mark.world_size(2, 3, 4),
    pytest.mark.filterwarnings("default"),  # what torch deprecates is not the point
]


def filled(value: float, device: torch.device, size: int = 4) -> torch.Tensor:
    return torch.full((size,), float(value), device=device)


def test_one_sends_to_one(rank: int, device: torch.device) -> None:
    # PyTorch, test/distributed/test_c10d_nccl.py, test_send_recv
    if rank == 0:
        dist.send(filled(7, device), 1)
    elif rank == 1:
        found = filled(0, device)
        dist.recv(found, 0)
        assert found.eq(7).all()


def test_irecv_from_all_others(rank: int, world_size: int, device: torch.device) -> None:
    # PyTorch, distributed_test.py, test_irecv
    if rank == 0:
        found = [filled(-1, device) for _ in range(1, world_size)]
        works = [dist.irecv(found[other - 1], other) for other in range(1, world_size)]
        for other, work in enumerate(works, start=1):
            assert work is not None
            work.wait()
            assert found[other - 1].eq(other).all()
    else:
        dist.send(filled(rank, device), 0)


def test_receive_from_any_source(rank: int, world_size: int, device: torch.device) -> None:
    # PyTorch, distributed_test.py, _test_send_recv_any_source
    if device.type == "cuda":
        pytest.skip("NCCL has no receive from any source")
    if rank == 0:
        sources = {dist.recv(filled(0, device)) for _ in range(1, world_size)}
        assert sources == set(range(1, world_size))
    else:
        dist.send(filled(rank, device), 0)


def test_tags(rank: int, device: torch.device) -> None:
    # PyTorch, distributed_test.py, _test_send_recv_with_tag
    if device.type == "cuda":
        pytest.skip("NCCL has no tags")
    if rank == 0:
        dist.send(filled(1, device), 1, tag=1)
        dist.send(filled(2, device), 1, tag=2)
    elif rank == 1:
        first, second = filled(0, device), filled(0, device)
        dist.recv(first, 0, tag=1)
        dist.recv(second, 0, tag=2)
        assert first.eq(1).all()
        assert second.eq(2).all()


def test_batch_with_open_ends(rank: int, world_size: int, device: torch.device) -> None:
    # Megatron-LM, p2p_communication.py, _batched_p2p_ops: neighbours that are there, both ways
    ops, found = [], {}
    for peer in (rank - 1, rank + 1):
        if 0 <= peer < world_size:
            found[peer] = filled(-1, device)
            ops.append(dist.P2POp(dist.isend, filled(rank, device), peer))
            ops.append(dist.P2POp(dist.irecv, found[peer], peer))
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert all(value.eq(peer).all() for peer, value in found.items())


def test_objects_are_sent(rank: int, device: torch.device) -> None:
    # PyTorch, test/distributed/test_c10d_object_collectives.py, test_send_recv_object_list
    if rank == 0:
        dist.send_object_list([{"a": 1}, "b"], dst=1, device=device)
    elif rank == 1:
        found: list[object] = [None, None]
        assert dist.recv_object_list(found, src=0, device=device) == 0
        assert found == [{"a": 1}, "b"]


def test_an_isend_that_nobody_waits_for(rank: int, device: torch.device) -> None:
    # A tutorial's `dist.isend(tensor, dst=1)` and `dist.irecv(tensor, src=0)` without a wait
    if device.type == "cuda":
        pytest.skip("what NCCL has not matched hangs the device")
    if rank == 0:
        test_an_isend_that_nobody_waits_for.work = dist.isend(filled(1, device), 1)  # type: ignore[attr-defined]


def test_after_the_leaked_isend(rank: int, device: torch.device) -> None:
    # What the test before has left must not be received here.
    if rank == 0:
        dist.send(filled(5, device), 1)
    elif rank == 1:
        found = filled(0, device)
        dist.recv(found, 0)
        assert found.eq(5).all()


def test_an_irecv_that_nobody_answers(rank: int, device: torch.device) -> None:
    if device.type == "cuda":
        pytest.skip("what NCCL has not matched hangs the device")
    if rank == 1:
        test_an_irecv_that_nobody_answers.work = dist.irecv(filled(1, device), 0)  # type: ignore[attr-defined]


def test_after_the_leaked_irecv(rank: int, device: torch.device) -> None:
    if rank == 0:
        dist.send(filled(6, device), 1)
    elif rank == 1:
        found = filled(0, device)
        dist.recv(found, 0)
        assert found.eq(6).all()


def test_sends_by_methods_of_the_group(
    rank: int, device: torch.device, process_group: dist.ProcessGroup
) -> None:
    # PyTorch, test/distributed/test_c10d_gloo.py: `pg.send([tensor], 1, 0)`
    backend = process_group._get_backend(device)
    if rank == 0:
        process_group.send([filled(3, device)], 1, 0).wait()
        backend.send([filled(4, device)], 1, 0).wait()  # type: ignore[attr-defined]
    elif rank == 1:
        found = filled(0, device)
        process_group.recv([found], 0, 0).wait()
        assert found.eq(3).all()
        backend.recv([found], 0, 0).wait()  # type: ignore[attr-defined]
        assert found.eq(4).all()


def test_sends_between_collectives(rank: int, world_size: int, device: torch.device) -> None:
    # Megatron-LM, tests/unit_tests/pipeline_parallel/test_schedules.py: both in one step
    total = filled(1, device)
    dist.all_reduce(total)
    if rank == world_size - 1:
        dist.send(total, 0)
    elif rank == 0:
        dist.recv(total, world_size - 1)
    dist.broadcast(total, 0)
    assert total.eq(world_size).all()


def test_monitored_barrier(rank: int, world_size: int, device: torch.device) -> None:
    # PyTorch, distributed_test.py, test_monitored_barrier_gloo
    del rank, world_size
    group = dist.group.WORLD if device.type == "cpu" else dist.new_group(backend="gloo")
    for _ in range(2):
        dist.monitored_barrier(group)
        dist.monitored_barrier(group, wait_all_ranks=True)


def _move(payload: torch.Tensor, rank: int, group: str) -> torch.Tensor:
    """Send from rank 0 to rank 1, as a compiled graph does."""
    ops = torch.ops._c10d_functional
    if rank == 0:
        ops.wait_tensor(ops.isend(payload, 1, 0, group))
        return payload
    received: torch.Tensor = ops.wait_tensor(ops.irecv(payload, 0, 0, group))
    return received


def _move_two(payload: torch.Tensor, rank: int, group: str) -> torch.Tensor:
    """Do it twice in one batch."""
    ops = torch.ops._c10d_functional
    kinds = [("isend", "irecv")[rank]] * 2
    tensors = [payload, payload.clone()]
    moved = ops.batch_p2p_ops(kinds, [1 - rank] * 2, [0, 0], tensors, group)
    last: torch.Tensor = [ops.wait_tensor(one) for one in moved][1]
    return last


@pytest.mark.parametrize(
    "move", [pytest.param(_move, id="eager"), pytest.param(_move_two, id="batch")]
)
def test_sends_of_graphs(
    rank: int,
    device: torch.device,
    process_group: dist.ProcessGroup,
    move: Callable[[torch.Tensor, int, str], torch.Tensor],
) -> None:
    # PyTorch, torch/distributed/_functional_collectives.py: isend, irecv and batch_p2p_ops
    _moves(move, rank, device, process_group)


@pytest.mark.world_size(3)  # compiling takes longer than all else
def test_sends_of_a_compiled_graph(
    rank: int, device: torch.device, process_group: dist.ProcessGroup
) -> None:
    _moves(torch.compile(_move, backend="aot_eager"), rank, device, process_group)


def _moves(
    move: Callable[[torch.Tensor, int, str], torch.Tensor],
    rank: int,
    device: torch.device,
    process_group: dist.ProcessGroup,
) -> None:
    if not hasattr(torch.ops._c10d_functional, "batch_p2p_ops"):
        pytest.skip("this torch has no operators of sends")
    if rank < 2:
        moved = move(filled(7 if rank == 0 else 0, device), rank, process_group.group_name)
        assert rank == 0 or moved.eq(7).all()

"""Collectives are counted, and sends are not."""

from __future__ import annotations

from pathlib import Path

from gang_suite import Suite

# No module imports torch: each rank does in its first test.
SUITE = """
    def pipeline(rank, world_size):
        import torch
        from torch.distributed import recv, send

        value = torch.ones(1)
        if rank:
            recv(value, rank - 1)
        if rank < world_size - 1:
            send(value, rank + 1)


    def extra(rank):
        from torch import ones
        from torch.distributed import all_reduce

        if rank == 0:
            all_reduce(ones(1), async_op=True)


    def test_first(rank, world_size):
        import torch.distributed as dist

        dist.init_process_group("gloo")
        pipeline(rank, world_size)


    def test_pipeline(process_group, rank, world_size):
        pipeline(rank, world_size)


    def test_extra_behind_sends(process_group, rank, world_size):
        pipeline(rank, world_size)
        extra(rank)


    def test_missed_behind_a_barrier(process_group, rank):
        import torch
        import torch.distributed as dist

        dist.monitored_barrier()
        if rank != 1:
            dist.all_reduce(torch.ones(1), async_op=True)


    def test_extra_of_any_backend(rank, world_size):
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group()
        pipeline(rank, world_size)
        extra(rank)


    def test_extra_by_a_functional_collective(process_group, rank):
        import torch
        import torch.distributed as dist
        from torch.distributed._functional_collectives import all_reduce

        if rank == 0:
            all_reduce(torch.ones(1), "sum", dist.group.WORLD)


    def test_group_of_a_class_in_python(process_group):
        import torch
        import torch.distributed as dist

        class Silent(dist.ProcessGroup):
            def __init__(self):
                super().__init__(0, 1)

            def recv(self, tensors, source, tag=0):
                return "received"

        assert Silent().recv([torch.ones(1)], 0) == "received"
        try:
            Silent().send([torch.ones(1)], 0, 0)
        except RuntimeError as error:
            assert "No backend" in str(error)
        else:
            raise AssertionError("sent by no backend")
"""


def test_an_extra_collective_is_found_among_sends(tmp_path: Path) -> None:
    suite = Suite(tmp_path).write(test_collectives=SUITE)
    run = suite.run("-v", "--ranks=3", "--device=cpu")
    assert run.words == {
        "test_first": "PASSED",
        "test_pipeline": "PASSED",
        "test_extra_behind_sends": "FAILED",
        "test_missed_behind_a_barrier": "FAILED",
        "test_extra_of_any_backend": "FAILED",
        "test_extra_by_a_functional_collective": "FAILED",
        "test_group_of_a_class_in_python": "PASSED",
    }, run.stdout
    assert run.stdout.count("\nevery rank passed, but they took part in different collectives") == 4
    assert "rank 0: passed after 1 collective\nranks 1-2: passed after 0 collectives" in run.stdout

"""For torch's MultiProcContinuousTest: processes and group once for a class."""

from __future__ import annotations

from bodies import NUM_TESTS, WORLD_SIZE, body
from torch.testing._internal.common_distributed import MultiProcContinuousTest
from typing_extensions import override


class TestReduce(MultiProcContinuousTest):
    world_size = WORLD_SIZE

    @override
    @classmethod
    def backend_str(cls) -> str:
        return "gloo"

    @override
    @classmethod
    def device_type(cls) -> str:
        return "cpu"


def _make(number: int) -> object:
    def test(self: TestReduce) -> None:
        body(number, self.rank, self.world_size)

    return test


for _number in range(NUM_TESTS):
    setattr(TestReduce, f"test_reduce_{_number}", _make(_number))

"""Delays at random before the phases and the collectives of a test; runs in ranks only (effects).

They follow from seed, test and rank alone. In every second test one rank is late at each place.
"""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable
from types import ModuleType
from typing import ParamSpec, TypeVar

from pytest_megatron.gang.originals import time

_Arguments = ParamSpec("_Arguments")
_Work = TypeVar("_Work")
_PHASE_S = 0.05  # at most, of a rank that is not late
_COLLECTIVE_S = 0.005
_IS_LATE = 4  # times as long
_MOST_S = 2.0  # of a test on each rank
# Of a process group; every function of `torch.distributed` ends in one of them.
_COLLECTIVES = (
    *("_allgather_base", "_reduce_scatter_base", "allgather", "allgather_coalesced"),
    *("allgather_into_tensor_coalesced", "allreduce", "allreduce_coalesced", "alltoall"),
    *("alltoall_base", "barrier", "broadcast", "gather", "recv", "reduce", "reduce_scatter"),
    *("reduce_scatter_tensor_coalesced", "scatter", "send"),
)


class Delays:
    """Delays of one rank; without a seed there are none."""

    def __init__(self, seed: int | None, rank: int, world_size: int) -> None:
        self._seed, self._rank, self._world_size = seed, rank, world_size
        self._node_id = ""
        self._random = random.Random()  # noqa: S311 - no secret
        self._left_s = 0.0
        self._factor = 1
        self._is_installed = False

    def before_phase(self, node_id: str) -> None:
        """Sleep before a phase of a test."""
        if self._seed is None:
            return
        if node_id != self._node_id:
            self._begin(node_id)
        if not self._is_installed and (torch := sys.modules.get("torch._C._distributed_c10d")):
            self._is_installed = True
            self._wrap(torch)
        self._sleep(_PHASE_S)

    def _begin(self, node_id: str) -> None:
        of_all = random.Random(f"{self._seed} {node_id}")  # noqa: S311
        late = of_all.randrange(2 * self._world_size)
        self._factor = _IS_LATE if late == self._rank else 1
        self._random.seed(f"{self._seed} {node_id} {self._rank}")
        self._node_id, self._left_s = node_id, _MOST_S

    def _sleep(self, most_s: float) -> None:
        delay_s = min(self._random.uniform(0, most_s) * self._factor, self._left_s)
        self._left_s -= delay_s
        time.sleep(delay_s)

    def _wrap(self, torch: ModuleType) -> None:
        group = torch.ProcessGroup
        for name in _COLLECTIVES:
            original = getattr(group, name, None)
            if original is not None:
                setattr(group, name, self._after_delay(original))

    def _after_delay(self, original: Callable[_Arguments, _Work]) -> Callable[_Arguments, _Work]:
        @functools.wraps(original)
        def delayed(*args: _Arguments.args, **settings: _Arguments.kwargs) -> _Work:
            self._sleep(_COLLECTIVE_S)
            return original(*args, **settings)

        return delayed

"""Records of ranks, as the file of each rank has them. Must not import torch."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypedDict

from pytest_megatron.base.files import write_text_atomically
from pytest_megatron.base.schema import validate
from pytest_megatron.runs.record import RankMemory


@dataclass(slots=True)
class MadeGroup:
    """A process group that a rank made, member or not.

    Attributes:
        name: By which its members meet.
        ranks: Global ranks, in the group's order.
        backend: As the program named it.
        line: Where it was made.
        after: Number of calls that the rank had made before.
    """

    name: str
    ranks: list[int]
    backend: str
    line: str
    after: int = 0


@dataclass(slots=True)
class Call:
    """A collective or a point-to-point call.

    Attributes:
        index: Order within the group, from 0.
        shapes: Shapes of the tensors that the rank gives, or else of those it receives.
        step: Counted from 1.
        issued: Clock of this rank when the program made the call.
        waited: The same when the program waited for its end; None if it never did.
        batch: Number of the batch of `batch_isend_irecv`; None outside.
        root: Global rank of a broadcast, reduce, gather or scatter.
        peer: Global rank at the other end; None where any may be.
        has_own_size: False where the size follows from what others have sent.
        read: Line that last read a value of a tensor since the call before; "" if none did.
        sent: Elements for each rank of the group, of an exchange of unequal parts.
    """

    group: str
    index: int
    kind: str
    dtype: str
    shapes: list[list[int]]
    step: int
    line: str
    issued: int
    num_bytes: int
    waited: int | None = None
    batch: int | None = None
    reduction: str = ""
    root: int | None = None
    peer: int | None = None
    tag: int = 0
    has_own_size: bool = True
    read: str = ""
    sent: list[int] = field(default_factory=list)
    received: list[int] = field(default_factory=list)

    @property
    def num_elements(self) -> int:
        """Over all tensors."""
        return sum(map(math.prod, self.shapes))


@dataclass(slots=True)
class LargeTensor:
    """A storage, as the operation that made it shaped it."""

    num_bytes: int
    dtype: str
    shape: list[int]
    line: str


class CallOptions(TypedDict, total=False):
    """What only some kinds of calls have."""

    reduction: str
    root: int | None
    peer: int | None
    tag: int
    sent: list[int]
    received: list[int]


@dataclass(slots=True)
class RankRecord:
    """All that one rank did.

    Attributes:
        steps: Steps of the optimizer that ended.
        forwards: Calls of models in each step: micro-batches times chunks.
        models: Classes of the models.
        layers: Numbers of layers, by the name of what contains them.
        last_step_call: Number of calls when the last step ended.
        end: `whole`, `cut` after the steps, `failed`, or `unknown` at an object that a rank that
            was not run would have sent.
        problem: Last line of the traceback.
        largest: Tensors at the peak of the memory.
    """

    rank: int
    world_size: int
    groups: list[MadeGroup] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    steps: int = 0
    forwards: list[int] = field(default_factory=list)
    models: list[str] = field(default_factory=list)
    layers: dict[str, list[int]] = field(default_factory=dict)
    last_step_call: int = 0
    end: str = ""
    problem: str = ""
    problem_line: str = ""
    memory: RankMemory = field(default_factory=RankMemory)
    largest: list[LargeTensor] = field(default_factory=list)


def write_record(path: Path, record: RankRecord) -> None:
    """Write the file of a rank."""
    write_text_atomically(path, json.dumps(asdict(record)))


def read_record(path: Path) -> RankRecord:
    """Read the file of a rank."""
    return validate(RankRecord, json.loads(path.read_text()))

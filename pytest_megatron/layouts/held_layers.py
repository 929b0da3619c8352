"""Layers of models over the stages of a pipeline: which no rank holds, and which two do. Pure.

Layers have numbers: megatron-core's `layer_number`, else the names of the parts of a container, as
in `layers.7`. They tell something only where the numbers go on from stage to stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, pairwise, product

from pytest_megatron.base.text import name_ranks
from pytest_megatron.layouts.model import RankRecord
from pytest_megatron.runs.record import RecordedFault


def judge_layers(records: Mapping[int, RankRecord]) -> tuple[list[RecordedFault], list[str]]:
    """Return the first fault of each container of layers, and what cannot be known."""
    peers = {rank: _peers(record) for rank, record in records.items()}
    faults: dict[str, RecordedFault] = {}
    unknown: dict[str, None] = {}
    for pipeline, name in product(_pipelines(peers), _containers(records)):
        held = {r: records[r].layers[name] for r in pipeline if records[r].layers.get(name)}
        if len(held) < 2:  # noqa: PLR2004 - no other to compare with
            continue
        is_repeated = any(len(set(numbers)) < len(numbers) for numbers in held.values())
        if is_repeated or len({min(numbers) for numbers in held.values()}) == 1:
            unknown[f"layers of {name}, whose numbers begin again in each rank"] = None
            continue
        for fault in (*_doubled(name, held), *_lacking(name, held, peers)):
            faults.setdefault(name, fault)
    for name in set(_containers(records)) - faults.keys():
        numbers = {n for record in records.values() for n in record.layers.get(name, ())}
        for low, high in _gaps(numbers):
            what = _between(low, high)
            unknown[f"{what} of {name}, since ranks that may hold them were not run"] = None
    return list(faults.values()), list(unknown)


def _containers(records: Mapping[int, RankRecord]) -> list[str]:
    """Return the names of all containers of layers."""
    return list(dict.fromkeys(name for record in records.values() for name in record.layers))


def _peers(record: RankRecord) -> set[int]:
    """Return the ranks that a rank sends to, or receives from."""
    found = {call.peer for call in record.calls if call.kind in ("send", "recv")}
    return {peer for peer in found if peer is not None and peer != record.rank}


def _pipelines(peers: Mapping[int, set[int]]) -> Iterator[list[int]]:
    """Yield the ranks of each pipeline: those that messages join."""
    left = sorted(peers)
    while left:
        found, waiting = set[int](), [left[0]]
        while waiting:
            rank = waiting.pop()
            if rank in peers and rank not in found:
                found.add(rank)
                waiting += peers[rank]
        left = [rank for rank in left if rank not in found]
        yield sorted(found)


def _doubled(name: str, held: Mapping[int, Sequence[int]]) -> Iterator[RecordedFault]:
    """Yield a layer that two stages hold; ranks that hold the same ones are copies of a stage."""
    for one, other in combinations(held, 2):
        both = set(held[one]) & set(held[other])
        if both and set(held[one]) != set(held[other]):
            yield _fault(f"layer {min(both)} of {name} is held twice", held, (one, other))


def _lacking(
    name: str, held: Mapping[int, Sequence[int]], peers: Mapping[int, set[int]]
) -> Iterator[RecordedFault]:
    """Yield layers that no rank holds, where no rank that was not run can hold them."""
    is_whole = all(peers[rank] <= peers.keys() for rank in held)
    for low, high in _gaps({number for numbers in held.values() for number in numbers}):
        for one, other in product(held, repeat=2):
            is_next = other in peers[one] and peers[one] <= peers.keys()
            if low in held[one] and high in held[other] and (is_whole or is_next):
                what = f"{_between(low, high)} of {name} {'are' if high > low + 2 else 'is'}"
                yield _fault(f"{what} held by no rank", held, (one, other))


def _gaps(numbers: set[int]) -> list[tuple[int, int]]:
    """Return the numbers before and after each gap."""
    return [(low, high) for low, high in pairwise(sorted(numbers)) if high > low + 1]


def _between(low: int, high: int) -> str:
    """Return `layer 3`, or `layers 3-4`, of those between two numbers."""
    return name_ranks(range(low + 1, high), "layer")


def _fault(what: str, held: Mapping[int, Sequence[int]], pair: tuple[int, int]) -> RecordedFault:
    """Return a fault with what the ranks of a pair hold."""
    holds = (f"rank {rank} holds {name_ranks(held[rank], 'layer')}" for rank in dict.fromkeys(pair))
    return RecordedFault(
        kind="parameters", ranks=tuple(dict.fromkeys(pair)), text=f"{what}: {', '.join(holds)}"
    )

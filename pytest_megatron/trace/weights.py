"""Exchange of initial weights between runs of different parallel layouts.

A run writes what a checkpoint of its models would hold, each tensor once over the ranks; another
run reads its parts of the whole tensors. The files have the names of a trace's: lines with key,
place and position of each part, and raw values. Every rank of the reader reads by itself, after
the writer has ended.
"""

from __future__ import annotations

import json
import math
import mmap
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from pytest_megatron.errors import TraceError
from pytest_megatron.trace.layout import rank_and_size
from pytest_megatron.trace.shards import TensorShard, local_tensors, local_values


def write_weights(model: torch.nn.Module, prefix: str, directory: Path, *, is_first: bool) -> None:
    """Write the model's parameters and buffers that no other rank writes.

    Args:
        model: The model, or a chunk of it.
        prefix: Name of the model; "" is the only one.
        directory: Gets the files of this rank.
        is_first: The files begin with this model, else they go on with it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    rank, _ = rank_and_size()
    with (
        (directory / f"rank_{rank}.jsonl").open(
            "w" if is_first else "a", encoding="utf-8"
        ) as lines,
        (directory / f"rank_{rank}.bin").open("wb" if is_first else "ab") as values,
    ):
        for local in local_tensors(model, prefix):
            for shard in local.cut(local_values(local.values)):
                if not shard.is_main:
                    continue
                raw = shard.tensor.contiguous().view(-1).cpu().view(torch.uint8).numpy()
                line = {
                    "key": shard.key,
                    "dtype": str(shard.tensor.dtype).removeprefix("torch."),
                    "shape": list(shard.tensor.shape),
                    "global_shape": list(shard.global_shape),
                    "global_offset": list(shard.global_offset),
                    "start": values.tell(),
                }
                values.write(raw.data)
                lines.write(json.dumps(line) + "\n")


def read_weights(model: torch.nn.Module, prefix: str, directory: Path) -> None:
    """Replace the model's parameters and buffers by those of the run that wrote `directory`.

    Raises:
        TraceError: The directory has no weights, or not those that this model needs.
    """
    stored = _Stored(directory)
    for local in local_tensors(model, prefix):
        values = local_values(local.values)
        parts = [stored.read(shard) for shard in local.cut(values)]
        values.copy_(local.merge(parts))


@dataclass(frozen=True, slots=True)
class _StoredPart:
    """A part of a whole tensor, in a file."""

    file: Path
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]


class _Stored:
    """The weights of a run, read a part at a time."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._maps: dict[Path, mmap.mmap] = {}
        self._parts: defaultdict[str, list[_StoredPart]] = defaultdict(list)
        for path in sorted(directory.glob("rank_*.jsonl")):
            for text in path.read_text(encoding="utf-8").splitlines():
                line = cast("dict[str, object]", json.loads(text))
                self._parts[str(line["key"])].append(
                    _StoredPart(
                        file=path.with_suffix(".bin"),
                        start=cast("int", line["start"]),
                        dtype=getattr(torch, str(line["dtype"])),
                        shape=_shape(line["shape"]),
                        global_shape=_shape(line["global_shape"]),
                        global_offset=_shape(line["global_offset"]),
                    )
                )
        if not self._parts:
            raise TraceError(
                str(directory), "holds no weights; the run that had to write them has ended early"
            )

    def read(self, shard: TensorShard) -> torch.Tensor:
        """Return the values of a part, put together from what was written.

        Raises:
            TraceError: The key is missing, has another shape, or the values have gaps.
        """
        values = shard.tensor.clone()
        num_filled = 0
        for part in self._parts.get(shard.key, ()):
            if part.global_shape != shard.global_shape and not shard.is_padded:
                raise TraceError(
                    str(self._directory),
                    f"{shard.key} is {list(part.global_shape)} there and"
                    f" {list(shard.global_shape)} here; compare runs of one model",
                )
            num_filled += self._fill(values, shard, part)
        if shard.key not in self._parts or (num_filled < values.numel() and not shard.is_padded):
            raise TraceError(
                str(self._directory),
                f"holds {num_filled} of {values.numel()} values of {shard.key}"
                f" {list(shard.global_shape)} at {list(shard.global_offset)}, which the model here"
                " has; compare runs of one model",
            )
        return values

    def _fill(self, values: torch.Tensor, shard: TensorShard, part: _StoredPart) -> int:
        """Copy what a stored part has of these values; returns how many."""
        stacked = len(shard.global_shape) - values.dim()  # axes that the tensors lack
        if shard.global_offset[:stacked] != part.global_offset[:stacked]:
            return 0
        here, there = [], []
        for mine, length, theirs, stored in zip(
            shard.global_offset[stacked:],
            values.shape,
            part.global_offset[stacked:],
            part.shape,
            strict=True,
        ):
            start, stop = max(mine, theirs), min(mine + length, theirs + stored)
            if start >= stop:
                return 0
            here.append(slice(start - mine, stop - mine))
            there.append(slice(start - theirs, stop - theirs))
        found = self._values(part)[tuple(there)]
        values[tuple(here)] = found.to(values)
        return found.numel()

    def _values(self, part: _StoredPart) -> torch.Tensor:
        """Return the stored values of a part."""
        if part.file not in self._maps:
            with part.file.open("rb") as file:
                # Copy-on-write, as torch wants memory that it could write to.
                self._maps[part.file] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        if not math.prod(part.shape):
            return torch.empty(part.shape, dtype=part.dtype)
        return torch.frombuffer(
            self._maps[part.file],
            dtype=part.dtype,
            count=math.prod(part.shape),
            offset=part.start,
        ).view(part.shape)


def _shape(value: object) -> tuple[int, ...]:
    return tuple(cast("list[int]", value))

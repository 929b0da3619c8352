"""Measures how far the gradients in checkpoints are apart; a program, run as a process.

    python -m pytest_megatron.workloads.verdict.tensors REFERENCE OTHER...

All are directories of one iteration in torch's distributed format, as megatron-core's
`torch_dist` writes them. Whatever the parallel layout was, such a checkpoint holds each tensor
once and whole, so layouts can be compared name by name. Prints a JSON array with an
object for each other one; judges nothing.
The only module of `launch` that imports torch, and so never imported by the controller.
"""

from __future__ import annotations

import json
import math
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

from pytest_megatron.process.tree import large_imports

with large_imports():
    import torch
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

# With Adam's betas at 0 the first moment is the gradient.
# Source: Megatron-LM tests/functional_tests/python_test_utils/test_optimizer_grads_match.py,
# d98e8a64dd.
_GRADIENT = re.compile(r"(chained_\d+\.)?optimizer\..*?\bexp_avg\.(?P<name>.+)").fullmatch
# All layers in one tensor, the layer first: `decoder.layers.mlp.linear_fc1.weight`.
_STACKED = re.compile(r"(?P<before>.*\blayers\.)(?P<after>[A-Za-z_].*)").fullmatch
_CHUNK_VALUES = 1 << 24  # that are held in double precision at once
_PADDED = re.compile(r"(^|.*\.)(word_embeddings|output_layer)\.weight").fullmatch


class Checkpoint:
    """The gradients in one checkpoint, read one at a time."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        metadata = FileSystemReader(directory).read_metadata()
        self.keys = {
            found["name"]: key
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata) and (found := _GRADIENT(key))
        }
        self._entries = metadata.state_dict_metadata

    def read(self, name: str) -> torch.Tensor:
        """Return one gradient of the checkpoint."""
        key = self.keys[name]
        entry = self._entries[key]
        assert isinstance(entry, TensorStorageMetadata)
        state = {key: torch.empty(entry.size, dtype=entry.properties.dtype)}
        load(state, storage_reader=FileSystemReader(self._directory))
        return state[key]


def measure(reference: Checkpoint, other: Checkpoint) -> dict[str, object]:
    """Return what both have, tensor by tensor, and what only one has."""
    return {
        "only_in_reference": sorted(reference.keys.keys() - other.keys.keys()),
        "only_in_other": sorted(other.keys.keys() - reference.keys.keys()),
        "tensors": [
            row
            for name in sorted(reference.keys.keys() & other.keys.keys())
            for row in _rows(name, reference.read(name), other.read(name))
        ],
    }


def _rows(name: str, a: torch.Tensor, b: torch.Tensor) -> Iterator[dict[str, object]]:
    """Yield one row for a tensor, or one for each layer that is in it."""
    num_padding = 0
    if a.shape != b.shape and a.shape[1:] == b.shape[1:] and _PADDED(name):
        num_rows = min(len(a), len(b))  # a vocabulary is padded for the layout
        num_padding = abs(len(a) - len(b))
        a, b = a[:num_rows], b[:num_rows]
    stacked = _STACKED(name)
    if a.shape == b.shape and a.dim() > 1 and stacked is not None:
        for layer, (c, d) in enumerate(zip(a, b, strict=True)):
            yield _row(f"{stacked['before']}{layer}.{stacked['after']}", c, d, 0)
    else:
        yield _row(name, a, b, num_padding)


def _row(name: str, a: torch.Tensor, b: torch.Tensor, num_padding: int) -> dict[str, object]:
    """Return how two tensors of a checkpoint differ."""
    not_finite = [int((~part.isfinite()).sum()) for part in (a, b)]
    row: dict[str, object] = {
        "name": name,
        "shape_reference": list(a.shape),
        "shape_other": list(b.shape),
        "num_padding": num_padding,
        "num_not_finite": sum(not_finite),
        "norm_reference": _norm(a),
        "norm_other": _norm(b),
        "norm_difference": None,
    }
    if a.shape == b.shape:
        row["norm_difference"] = _norm(a, b)
    return row


def _norm(tensor: torch.Tensor, other: torch.Tensor | None = None) -> float | None:
    """Return the norm of a tensor, or of its difference to another; None where not finite.

    In double precision, a part at a time: the embeddings of a large model have gigabytes.
    """
    parts = torch.split(tensor.flatten(), _CHUNK_VALUES)
    others = [None] * len(parts) if other is None else torch.split(other.flatten(), _CHUNK_VALUES)
    squares = 0.0
    for part, away in zip(parts, others, strict=True):
        apart = part.double() if away is None else part.double() - away.double()
        squares += float(apart.square().sum())
    return math.sqrt(squares) if math.isfinite(squares) else None


def main() -> None:
    """Compare the directories of the command line, all with the first."""
    warnings.filterwarnings("ignore")  # that it runs in one process is the purpose
    reference, *others = (Checkpoint(Path(word)) for word in sys.argv[1:])
    found = [measure(reference, other) for other in others]
    print(json.dumps(found, allow_nan=False))  # noqa: T201 - its answer


if __name__ == "__main__":
    main()

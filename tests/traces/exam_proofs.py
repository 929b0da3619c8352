"""Proves without the comparison that a bug changes a training, and that a layout trains.

A bug's layout is trained three times, each rank forked off this process: clean, clean with noise of
the size of rounding on its gradients, and with the bug. A bug is real if it moves the loss, the
gradient's norm or a parameter at least `FACTOR` times as far as the noise does.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import socket
import sys
import tempfile
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import buggy_train
import gpt_logging
import gpt_model
import torch
import train_gpt
from exam_cases import BF16, Bug, Function, Layout, Value, after, wrap
from megatron.core.distributed import DistributedDataParallel

FACTOR = 10
_NOISE = {"fp32": 1e-6, "bf16": 4e-3}
_FLOOR = {"fp32": 1e-6, "bf16": 1e-3}


class Trained(TypedDict):
    """What a rank had in the end."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]


Ranks = list[Trained]


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """How far apart two trainings of one layout are, each relative.

    Attributes:
        weights: Of each parameter, the largest over ranks.
    """

    loss: float
    norm: float
    weights: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What was found of one bug in one dtype."""

    bug: str
    dtype: str
    moved: Distance | None
    noise: Distance | None
    problem: str

    @property
    def is_real(self) -> bool:
        """Whether the bug moves anything further than rounding does."""
        if self.moved is None or self.noise is None:
            return False
        pairs = (
            (self.moved.loss, self.noise.loss),
            (self.moved.norm, self.noise.norm),
            self.weight_moved,
        )
        return any(moved >= FACTOR * max(noise, _FLOOR[self.dtype]) for moved, noise in pairs)

    @property
    def where(self) -> str:
        """The parameter that moves furthest in units of its noise."""
        assert self.moved is not None
        assert self.noise is not None
        weights, noise = self.moved.weights, self.noise.weights
        return max(weights, key=lambda name: weights[name] / max(noise[name], _FLOOR[self.dtype]))

    @property
    def weight_moved(self) -> tuple[float, float]:
        """How far `where` moves, and how far with noise."""
        assert self.moved is not None
        assert self.noise is not None
        return self.moved.weights[self.where], self.noise.weights[self.where]


class Trainings:
    """Trains layouts, each once."""

    def __init__(self) -> None:
        self._done: dict[str, Ranks | str] = {}

    def train(self, arguments: Mapping[str, Value], ranks: int, bug: str = "none") -> Ranks | str:
        """Train on forked ranks; the text is what went wrong."""
        key = f"{sorted(arguments.items())} {ranks} {bug}"
        if key not in self._done:
            self._done[key] = train(words_of(arguments), ranks, bug)
        return self._done[key]


def words_of(arguments: Mapping[str, Value]) -> list[str]:
    """Spell MODEL_ARGS on a command line."""
    words: list[str] = []
    for name, value in arguments.items():
        if value is True:
            words.append(name)
        elif value is not None and value is not False:
            words += [name, str(value)]
    return words


def train(words: list[str], ranks: int, bug: str) -> Ranks | str:
    """Fork the ranks of one training and wait for them."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as directory:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
        free.close()
        children = [
            _fork(words, (rank, ranks), port, bug, Path(directory)) for rank in range(ranks)
        ]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        if any(codes):
            logs = [Path(directory, f"{rank}.txt").read_text() for rank in range(ranks)]
            return max((log.strip().splitlines() or ["no word"])[-1] for log in logs)
        loaded = [torch.load(Path(directory, f"{rank}.pt")) for rank in range(ranks)]
        return [
            Trained(losses=one["losses"], norms=one["norms"], weights=one["weights"])
            for one in loaded
        ]


def _fork(words: list[str], place: tuple[int, int], port: int, bug: str, directory: Path) -> int:
    """Start one rank; gives its process id."""
    child = os.fork()
    if child:
        return child
    rank, size = place
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        MASTER_ADDR="localhost",
        MASTER_PORT=str(port),
    )
    sys.argv = ["train_gpt.py", *words]
    said, code = io.StringIO(), 1
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            _train_rank(bug, directory / f"{rank}.pt")
            code = 0
        finally:
            (directory / f"{rank}.txt").write_text(f"{said.getvalue()}\n{traceback.format_exc()}")
            os._exit(code)


def _train_rank(bug: str, target: Path) -> None:
    """Train in this process and write what came of it."""
    result = Trained(losses=[], norms=[], weights={})
    chunks: list[DistributedDataParallel] = []

    def note(_: object, step: gpt_logging.Step) -> None:
        result["losses"].append(step.loss)
        result["norms"].append(step.grad_norm)

    def make(original: Function) -> Function:
        def build(*args: object, **kwargs: object) -> object:
            trained = original(*args, **kwargs)
            assert isinstance(trained, gpt_model.Trained)
            chunks.extend(trained.chunks)
            return trained

        return build

    buggy_train.plant(bug)
    after(gpt_logging.RunLog, "tell", note)
    wrap(gpt_model, "build", make)
    train_gpt.main()
    for number, chunk in enumerate(chunks):
        for name, weight in chunk.named_parameters():
            result["weights"][f"{number}.{name}"] = weight.detach().float().clone()
    torch.save(result, target)


def distance(one: Ranks, other: Ranks) -> Distance:
    """Compare two trainings of the same layout rank by rank."""
    losses, norms = [0.0], [0.0]
    weights: dict[str, float] = {}
    for left, right in zip(one, other, strict=True):
        losses += map(relative, left["losses"], right["losses"])
        norms += map(relative, left["norms"], right["norms"])
        for name, value in left["weights"].items():
            size = max(float(value.norm()), 1e-30)
            apart = float((value - right["weights"][name]).norm()) / size
            weights[name] = max(weights.get(name, 0.0), apart)
    return Distance(loss=max(losses), norm=max(norms), weights=weights)


def relative(one: float, other: float) -> float:
    """Relative difference; what is NaN in both, as the loss in early stages, is the same."""
    if math.isnan(one) and math.isnan(other):
        return 0.0
    return abs(one - other) / max(abs(one), 1e-30)


def prove_bug(bug: Bug, dtype: str, trainings: Trainings) -> Proof:
    """Train a bug's layout with and without it."""
    arguments = {**bug.pair.candidate_arguments, **(BF16 if dtype == "bf16" else {})}
    noisy = {**arguments, "--gradient-noise": _NOISE[dtype]}
    ranks = bug.pair.ranks
    clean, disturbed = trainings.train(arguments, ranks), trainings.train(noisy, ranks)
    planted = trainings.train(arguments, ranks, bug.name)
    for found in (clean, disturbed, planted):
        if isinstance(found, str):
            return Proof(bug=bug.name, dtype=dtype, moved=None, noise=None, problem=found)
    assert not isinstance(clean, str)
    assert not isinstance(disturbed, str)
    assert not isinstance(planted, str)
    return Proof(
        bug=bug.name,
        dtype=dtype,
        moved=distance(clean, planted),
        noise=distance(clean, disturbed),
        problem="",
    )


def in_a_line(proof: Proof) -> str:
    """Word how far a bug moves loss, norm and a parameter, and how far noise does."""
    if proof.moved is None or proof.noise is None:
        return proof.problem
    moved, noise = proof.weight_moved
    return (
        f"loss {proof.moved.loss:.0e} (noise {proof.noise.loss:.0e}),"
        f" norm {proof.moved.norm:.0e} ({proof.noise.norm:.0e}),"
        f" {proof.where.replace('module.', '')} {moved:.0e} ({noise:.0e})"
    )


def try_layout(pair: Layout, trainings: Trainings) -> str:
    """Train both sides of a clean pair; gives how far apart they are, or what went wrong."""
    one = trainings.train(pair.reference_arguments, pair.reference_ranks)
    other = trainings.train(pair.candidate_arguments, pair.ranks)
    if isinstance(one, str) or isinstance(other, str):
        return f"does not train: {one if isinstance(one, str) else other}"
    apart = max(map(relative, one[-1]["losses"], other[-1]["losses"]))
    norms = max(map(relative, one[-1]["norms"], other[-1]["norms"]))
    return f"losses {apart:.1e}, norms {norms:.1e} apart"

"""What the exam of traces is made of: layouts, bugs, right answers, and the tools to plant a bug.

A bug changes megatron-core, or the training program, in the processes of one phase. It is planted
by name (`buggy_train.py`) before the program runs.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from megatron.core.transformer import MegatronModule as Untyped  # whatever has no types

Value = str | int | float | bool | None
Plant = Callable[[], None]


class Function(Protocol):
    """Any function."""

    def __call__(self, *args: Untyped, **kwargs: Untyped) -> Untyped:
        """Do what it does."""
        ...


TINY: Mapping[str, Value] = {
    "--num-layers": 2,
    "--hidden-size": 32,
    "--num-attention-heads": 4,
    "--seq-length": 16,
    "--vocab-size": 64,
    "--micro-batch-size": 2,
    "--global-batch-size": 8,
    "--train-iters": 3,
    "--lr": 1.0e-3,
    "--lr-decay-style": "constant",
    "--seed": 1234,
    "--deterministic-mode": True,
}
MOE: Mapping[str, Value] = {"--num-experts": 4, "--disable-bias-linear": True}
TP2: Mapping[str, Value] = {"--tensor-model-parallel-size": 2}
TP4: Mapping[str, Value] = {"--tensor-model-parallel-size": 4}
SP: Mapping[str, Value] = {"--sequence-parallel": True}
PP2: Mapping[str, Value] = {"--pipeline-model-parallel-size": 2}
PP4: Mapping[str, Value] = {"--pipeline-model-parallel-size": 4}
EP2: Mapping[str, Value] = {"--expert-model-parallel-size": 2}
VIRTUAL: Mapping[str, Value] = {"--num-layers-per-virtual-pipeline-stage": 1}
SHARDED: Mapping[str, Value] = {"--use-distributed-optimizer": True}
ALL_TO_ALL: Mapping[str, Value] = {"--moe-token-dispatcher-type": "alltoall"}
FOUR_LAYERS: Mapping[str, Value] = {"--num-layers": 4}
DROPOUT: Mapping[str, Value] = {"--hidden-dropout": 0.1, "--attention-dropout": 0.1}
UNIFORM: Mapping[str, Value] = {
    "--recompute-granularity": "full",
    "--recompute-method": "uniform",
    "--recompute-num-layers": 1,
}
SWIGLU: Mapping[str, Value] = {"--swiglu": True, "--disable-bias-linear": True}
LLAMA: Mapping[str, Value] = {
    **SWIGLU,
    "--normalization": "RMSNorm",
    "--position-embedding-type": "rope",
    "--num-query-groups": 2,
    "--untie-embeddings-and-output-weights": True,
}
BF16: Mapping[str, Value] = {"--bf16": True}
UNTIED: Mapping[str, Value] = {"--untie-embeddings-and-output-weights": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A reference and a candidate that train the same.

    Attributes:
        name: Of the pair, or of the bug that needs it.
        common: MODEL_ARGS of both, over `TINY`.
        candidate: MODEL_ARGS that only the candidate has.
        reference: MODEL_ARGS that only the reference has.
        ranks: Of the candidate.
    """

    name: str
    ranks: int
    candidate: Mapping[str, Value]
    common: Mapping[str, Value]
    reference: Mapping[str, Value]
    reference_ranks: int

    @property
    def candidate_arguments(self) -> dict[str, Value]:
        """All MODEL_ARGS of the candidate."""
        return {**TINY, **self.common, **self.candidate}

    @property
    def reference_arguments(self) -> dict[str, Value]:
        """All MODEL_ARGS of the reference."""
        return {**TINY, **self.common, **self.reference}

    @property
    def is_bf16(self) -> bool:
        """Whether the candidate trains in bfloat16."""
        return bool(self.candidate_arguments.get("--bf16"))


def layout(
    name: str,
    ranks: int,
    *candidate: Mapping[str, Value],
    common: Iterable[Mapping[str, Value]] = (),
    reference: Iterable[Mapping[str, Value]] = (),
    reference_ranks: int = 1,
) -> Layout:
    """Make a layout of parts."""
    return Layout(
        name=name,
        ranks=ranks,
        candidate=_joined(candidate),
        common=_joined(common),
        reference=_joined(reference),
        reference_ranks=reference_ranks,
    )


def _joined(parts: Iterable[Mapping[str, Value]]) -> dict[str, Value]:
    return {name: value for part in parts for name, value in part.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A first divergence that names a bug rightly.

    Attributes:
        phase: forward, backward, gradient or update.
        modules: Pattern of the global name of the module.
        tensors: Pattern of the tensor in it, as far as only some are right.
    """

    phase: str
    modules: str
    tensors: str

    def is_right(self, phase: str, module: str, tensor: str) -> bool:
        """Whether a first divergence is this one."""
        return (
            phase == self.phase
            and re.fullmatch(self.modules, module) is not None
            and re.fullmatch(self.tensors, tensor) is not None
        )


def answer(phase: str, modules: str, tensors: str = ".*") -> Answer:
    """Write an answer on one line."""
    return Answer(phase=phase, modules=modules, tensors=tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug:
    """One planted bug.

    Attributes:
        name: What `buggy_train.py` calls it.
        text: What is wrong.
        source: Where it was seen; "made" where it was not.
        pair: The layouts to compare; the candidate has the bug.
        dtypes: fp32, bf16.
        answers: First divergences that name it rightly.
        plant: Puts it into this process; called once, before the program runs.
    """

    name: str
    text: str
    source: str
    pair: Layout
    dtypes: tuple[str, ...]
    answers: tuple[Answer, ...]
    plant: Plant


def wrap(owner: Untyped, name: str, make: Callable[[Function], Function]) -> None:
    """Replace a function of a module or a class by what `make` makes of it."""
    setattr(owner, name, make(getattr(owner, name)))


def skip(owner: Untyped, name: str) -> None:
    """Replace a function by one that does nothing."""
    wrap(owner, name, lambda _: lambda *_args, **_kwargs: None)


def core(name: str) -> Untyped:
    """Import a module of megatron-core; a package may export a function of its name."""
    return importlib.import_module(f"megatron.core.{name}")


def after(owner: Untyped, name: str, then: Function) -> None:
    """Call `then` with the arguments of each call of a function, after it."""

    def make(original: Function) -> Function:
        def both(*args: Untyped, **kwargs: Untyped) -> Untyped:
            result = original(*args, **kwargs)
            then(*args, **kwargs)
            return result

        return both

    wrap(owner, name, make)

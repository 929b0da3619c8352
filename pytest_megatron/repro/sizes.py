"""On how few ranks a training can run, and what that changes. Pure.

Source: megatron.core.parallel_state.initialize_model_parallel, megatron-core 0.16: the world is a
multiple of TP x PP x CP, and of expert TP x EP x PP.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from pytest_megatron.errors import ReproError

_FLAGS = {
    "tp": ("tensor-model-parallel-size", "tp-size", "tp"),
    "pp": ("pipeline-model-parallel-size", "pp-size", "pp"),
    "cp": ("context-parallel-size", "cp-size", "cp"),
    "ep": ("expert-model-parallel-size", "ep-size", "ep"),
    "etp": ("expert-tensor-parallel-size", "etp-size", "etp"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSizes:
    """How a training splits its model.

    Attributes:
        etp: Of experts; as `tp` where it is not said.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1

    @property
    def least(self) -> int:
        """The fewest ranks; every world size is a multiple of it."""
        return math.lcm(self.tp * self.pp * self.cp, self.etp * self.ep * self.pp)

    def data_parallel(self, world_size: int) -> int:
        """Return how many replicas train side by side."""
        return world_size // (self.tp * self.pp * self.cp)


def sizes_of(words: Sequence[str]) -> TrainingSizes:
    """Read them from the arguments of a training: `--flag 2`, `--flag=2` and `flag=2`."""
    found: dict[str, int] = {}
    for index, word in enumerate(words):
        name, equals, value = word.lstrip("-+").partition("=")
        if not equals:
            if not word.startswith("--"):
                continue
            value = words[index + 1] if index + 1 < len(words) else ""
        plain = name.rpartition(".")[2].replace("_", "-")
        for size, flags in _FLAGS.items():
            if plain in flags and re.fullmatch(r"[1-9]\d{0,5}", value):
                found[size] = int(value)
    found.setdefault("etp", found.get("tp", 1))
    return TrainingSizes(**found)


def say_fewer_ranks(sizes: TrainingSizes, *, there: int, here: int) -> list[str]:
    """Return what changes on another number of ranks.

    Raises:
        ReproError: The model cannot be split over so many.
    """
    if here % sizes.least:
        raise ReproError(
            "--ranks",
            f"{here} is no multiple of {sizes.least}, which the training needs (TP "
            f"{sizes.tp}, PP {sizes.pp}, CP {sizes.cp}, EP {sizes.ep}, expert TP {sizes.etp}); "
            f"give a multiple of {sizes.least}",
        )
    if here == there:
        return []
    before, after = sizes.data_parallel(there), sizes.data_parallel(here)
    text = (
        f"{here} instead of {there} ranks: data parallel {before} -> {after}; sums are taken in "
        f"another order, so curves differ in their last digits, and goldens, times and memory of "
        f"{there} ranks say little here"
    )
    return [text]

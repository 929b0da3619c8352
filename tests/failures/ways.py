"""The register of ways in which a training goes wrong; each says where it strikes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from training import Training

Point = Literal[
    "start",  # before torch is imported
    "imports",  # after it, before the process group
    "setup",  # the model is there
    "step",
    "loss",  # computed, not yet differentiated
    "gradients",  # not yet summed
    "reduction",  # in the place of the sum
    "reduced",
    "end",  # of the last iteration
    "saved",  # the final checkpoint
    "destroyed",  # the process group
    "never",
]
POINTS_IN_AN_ITERATION = ("step", "loss", "gradients", "reduced")
_MODULES = (
    "ways_innocent",
    "ways_python",
    "ways_system",
    "ways_network",
    "ways_ranks",
    "ways_cuda",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to go wrong.

    Attributes:
        is_everywhere: Whether all ranks do it, the guilty and the others.
        is_lasting: Whether it strikes at every pass of its point.
    """

    point: str
    act: Callable[[Training], None]
    is_everywhere: bool = False
    is_lasting: bool = False


_WAYS: dict[str, Way] = {}


def way(
    point: Point, *, is_everywhere: bool = False, is_lasting: bool = False
) -> Callable[[Callable[[Training], None]], Callable[[Training], None]]:
    """Register a function under its own name."""

    def register(act: Callable[[Training], None]) -> Callable[[Training], None]:
        name = act.__name__
        _WAYS[name] = Way(point=point, act=act, is_everywhere=is_everywhere, is_lasting=is_lasting)
        return act

    return register


def load() -> None:
    """Import every module of ways."""
    for module in _MODULES:
        import_module(module)


def find(name: str) -> Way:
    """Return a way by its name."""
    load()
    if name not in _WAYS:
        raise SystemExit(f"--fault: unknown {name!r}, expected one of {', '.join(sorted(_WAYS))}")
    return _WAYS[name]

"""Tables of compatibility: drivers for CUDA, and packages that are compiled against torch."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pytest_megatron.base.schema import trusted

TABLE = Path(__file__).parent / "compat.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """A package that is compiled against torch.

    Attributes:
        name: Of the distribution; `also`: other distributions of the same code.
        modules: Whose import shows that it works.
        objects: Patterns of its shared objects, below site-packages.
        wheel: Template of the names of published wheels, None where none are published.
        build: The command that compiles it, where that is the only way.
        needs: Arguments of a training that cannot do without it.
    """

    name: str
    also: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    objects: tuple[str, ...] = ()
    wheel: str | None = None
    build: str | None = None
    latest: str
    force: str
    needs: tuple[str, ...] = ()
    why: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Compat:
    """The tables.

    Attributes:
        least_driver: CUDA's major version -> the least driver.
        release_driver: CUDA's version -> the driver that its release came with.
    """

    least_driver: Mapping[str, str]
    release_driver: Mapping[str, str]
    compiled: tuple[Compiled, ...]


@functools.cache
def compat() -> Compat:
    """Return the built-in tables."""
    return trusted(Compat, tomllib.loads(TABLE.read_text(encoding="utf-8")))

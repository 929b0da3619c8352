"""Settings of a trace, as the variable `PYTEST_MEGATRON_TRACE` passes them to every rank.

The process that starts the ranks writes the variable, the recorder in each of them reads it. Must
not import torch: the controller imports this module.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

from pytest_megatron.base.schema import Positive, SchemaError, closed, parse
from pytest_megatron.errors import TraceError

VARIABLE = "PYTEST_MEGATRON_TRACE"
# Of a session: how the trainings that it traces begin, as JSON of a `TraceBeginning`.
BEGIN_VARIABLE = "PYTEST_MEGATRON_TRACE_BEGIN"
TraceValues: TypeAlias = Literal["hash", "full"]
_T = TypeVar("_T")


@closed
@dataclass(frozen=True, kw_only=True)
class TraceBeginning:
    """What a training begins with.

    Attributes:
        weights_to: Directory that gets the initial weights.
        weights_from: Directory of the initial weights of another run, which replace those of
            this one; the parallel layout of that run may differ.
        noise_seed: Seed of a disturbance at rounding size; None disturbs nothing.
    """

    weights_to: Path | None = None
    weights_from: Path | None = None
    noise_seed: int | None = None

    @property
    def has_new_weights(self) -> bool:
        """The weights that the program made are not those that it trains."""
        return self.weights_from is not None or self.noise_seed is not None


@closed
@dataclass(frozen=True, kw_only=True)
class TraceSettings(TraceBeginning):
    """What a trace holds and where it is written.

    Attributes:
        directory: Gets `rank_<r>.jsonl` of each rank, and `rank_<r>.bin` with `full`.
        steps: Optimizer steps that are recorded, from the first.
        values: `full` stores each tensor's local values too, `hash` its statistics only.
    """

    directory: Path
    steps: Positive = 2
    values: TraceValues = "hash"

    def to_json(self) -> str:
        """Return the value of the variable PYTEST_MEGATRON_TRACE."""
        return json.dumps(asdict(self), default=str)


def _parsed(kind: type[_T], variable: str, text: str) -> _T:
    """Return the value of a variable; a TraceError if it departs from its schema."""
    try:
        return parse(kind, text)
    except SchemaError as error:
        raise TraceError(variable, f"{error}; correct it, or unset the variable") from None


def read_settings(env: Mapping[str, str] | None = None) -> TraceSettings | None:
    """Return the settings in the environment; None without the variable.

    Raises:
        TraceError: The settings are not sound.
    """
    text = (os.environ if env is None else env).get(VARIABLE)
    return _parsed(TraceSettings, VARIABLE, text) if text else None


def variables_of(
    directory: Path, steps: int, values: TraceValues, env: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables of ranks that record, with the beginning that a session asks for.

    Args:
        directory: See `TraceSettings`, as for the next two.
        steps: Likewise.
        values: Likewise.
        env: The environment of the session.

    Raises:
        TraceError: The variable's value means nothing.
    """
    begin = _parsed(TraceBeginning, BEGIN_VARIABLE, env.get(BEGIN_VARIABLE) or "{}")
    settings = TraceSettings(directory=directory, steps=steps, values=values, **asdict(begin))
    return {VARIABLE: settings.to_json()}
